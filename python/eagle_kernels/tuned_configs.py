"""How the Triton split kernels of norm_concat_linear cut a product: a tuned table per GPU, or else a heuristic.

A table is `configs/<device name>.json`:

    {"norm_concat_linear": [{"K": 3, "H": 4096, "D": 4096, "dtype": "bfloat16",
      "rows": {"16": {"BT": 16, "BD": 64, ...}, "256": null}}]}

`rows` maps a measured T to the fields of `Tiles`; null means norm_concat and a library product. A call uses the entry
nearest to its T in log space. `splits` decides the order in which a row's products are summed: with two entries of
different `splits` the row's bits differ.
`eagle-kernels tune --write` measures the rows and writes them.
"""

import functools
import json
import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from .checks import error

CONFIGS = Path(__file__).parent / "configs"
_log = logging.getLogger("eagle_kernels")


class Tiles(NamedTuple):
    """One way to cut [N, K*H] x [D, K*H]^T; a row's bits depend on these and on nothing else of the call's sizes.

    A program computes BT rows x BD columns of one of `splits` parts of one chunk, BK columns of x at a time.
    swap: the weight is the left operand of the tensor core, which then wants BD, not BT, to be a multiple of 64.
    """

    BT: int
    BD: int
    BK: int
    splits: int
    swap: bool
    num_warps: int
    num_stages: int
    finalize_columns: int


@dataclass(frozen=True)
class Gpu:
    """What the choices of kernels and tiles depend on."""

    name: str
    arch: int | str  # 90 for sm_90; "gfx942"
    shared_memory: int  # bytes that one program may have
    multiprocessors: int = 132  # of an H100 and an H200


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu("Triton interpreter", 90, 227 << 10)
    properties = torch.cuda.get_device_properties(device)
    arch: int | str = properties.major * 10 + properties.minor
    if torch.version.hip is not None:
        arch = properties.gcnArchName.partition(":")[0]
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 64 << 10)
    return Gpu(properties.name, arch, shared_memory, properties.multi_processor_count)


def choose_tiles(
    gpu: Gpu,
    T: int,
    K: int,
    H: int,
    D: int,
    dtype: torch.dtype,
    *,
    has_residuals: bool,
    split_only: bool = False,
    directory: Path = CONFIGS,
) -> tuple[Tiles | None, str]:
    """(tiles, why); None for norm_concat and a library product, unless `split_only`."""
    rows = _tuned_rows(gpu.name, K, H, D, str(dtype).removeprefix("torch."), directory) or {}
    if split_only:
        rows = {tuned: tiles for tuned, tiles in rows.items() if tiles is not None}
    if not rows:
        if split_only:  # more rows run these tiles too
            T = min(T, SPLIT_ROWS[dtype])
        tiles = heuristic(gpu, T, K, H, D, dtype)
        limit = f"> {SPLIT_ROWS[dtype]}" if tiles is None else f"<= {tiles.BT}"
        reason = f"T={T} {limit} by the heuristic, without a tuned table for {gpu.name}"
    else:
        nearest = min(rows, key=lambda tuned: abs(math.log(tuned / max(T, 1))))
        tiles, reason = rows[nearest], f"T={nearest} is the tuned entry nearest to T={T}"
    if tiles is None:
        return None, reason
    stages = min(tiles.num_stages, gpu.shared_memory // stage_bytes(tiles, dtype, has_residuals))
    return tiles._replace(num_stages=max(stages, 1)), reason


@functools.cache
def _tuned_rows(
    device_name: str, K: int, H: int, D: int, dtype_name: str, directory: Path
) -> dict[int, Tiles | None] | None:
    """The table's rows of a shape; one line in the log where there are none."""
    rows = read_rows(device_name, Shape(K, H, D, dtype_name), directory)
    if rows is None:
        _log.info(
            "norm_concat_linear: K=%d H=%d D=%d %s is not tuned on %s; `eagle-kernels tune "
            "--op norm_concat_linear --chunks %d --hidden %d --out %d --dtype %s --write` measures it",
            *(K, H, D, dtype_name, device_name, K, H, D, dtype_name),
        )
    return rows


@dataclass(frozen=True)
class Shape:
    """What an entry of a table is for; dtype as torch writes it, "bfloat16"."""

    K: int
    H: int
    D: int
    dtype: str


def read_rows(device_name: str, shape: Shape, directory: Path) -> dict[int, Tiles | None] | None:
    """The measured rows of a shape; None where the GPU has no table or the table no such shape."""
    entry = read_entries(device_name, directory).get(shape)
    return None if entry is None else _rows_of(entry)


def _rows_of(entry: dict) -> dict[int, Tiles | None]:
    return {int(T): None if tiles is None else Tiles(**tiles) for T, tiles in entry["rows"].items()}


def read_entries(device_name: str, directory: Path) -> dict[Shape, dict]:
    """The entries of a GPU's table, as the file has them; raises ValueError for a file that is no table."""
    path = table_path(device_name, directory)
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["norm_concat_linear"]
        by_shape = {Shape(*(entry[field.name] for field in fields(Shape))): entry for entry in entries}
        list(map(_rows_of, by_shape.values()))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as failure:
        because = f"{type(failure).__name__}: {failure}"
        raise error(ValueError, "norm_concat_linear", f"{str(path)!r} is damaged", "a tuned table", because) from None
    return by_shape


def table_path(device_name: str, directory: Path = CONFIGS) -> Path:
    return directory / f"{device_name.replace(' ', '_')}.json"


def table_with_rows(
    device_name: str, shape: Shape, rows: dict[int, Tiles | None], measured_with: dict[str, str], directory: Path
) -> str:
    """The text of the GPU's table with measured rows in it: rows of other T and other shapes stay."""
    by_shape = read_entries(device_name, directory)
    entry = by_shape.setdefault(shape, asdict(shape) | {"rows": {}})
    entry["rows"] |= {str(T): None if tiles is None else tiles._asdict() for T, tiles in rows.items()}
    entry["rows"] = dict(sorted(entry["rows"].items(), key=lambda item: int(item[0])))
    entry["measured_with"] = measured_with
    return json.dumps({"norm_concat_linear": list(by_shape.values())}, indent=1) + "\n"


# The largest T of the split plans, a heuristic: above about 128 rows a 16-bit product is bound by tensor cores and no
# longer by the weight's bytes. fp32 multiplies without tensor cores, so its limit is lower.
SPLIT_ROWS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 16}

# Enough programs to keep every SM of today's GPUs loading (132 on an H100); a constant, so that bits do not depend on
# the GPU's size.
_WANTED_PROGRAMS = 128


def invariant_rows(dtype: torch.dtype) -> int:
    """The T whose tiles serve every T under EAGLE_KERNELS_BATCH_INVARIANT=1."""
    return min(64, SPLIT_ROWS[dtype])


def heuristic(gpu: Gpu, T: int, K: int, H: int, D: int, dtype: torch.dtype) -> Tiles | None:
    """Tiles for a shape that no table has. Compiled, they do not spill with gains and residuals (tests/compile); their
    speed is unmeasured."""
    if SPLIT_ROWS[dtype] < T:
        return None
    BT, BD, swap, num_warps = _block(gpu, T, dtype)
    if dtype == torch.float32 or (BT == 128 and isinstance(gpu.arch, str)):
        BK = 32  # with more, two stages with a residual exceed AMD's 64 KB
    else:
        BK = 128 if BT == 16 and H % 128 == 0 and gpu.shared_memory > 150 << 10 else 64
    tiles = Tiles(BT, BD, BK, _splits(K, H, D, BD, BK), swap, num_warps, 1, 512 if BT <= 32 else 1024)
    budget = _pipeline_bytes(gpu, tiles)
    return tiles._replace(num_stages=max(2, min(8, budget // stage_bytes(tiles, dtype, False))))


def _pipeline_bytes(gpu: Gpu, tiles: Tiles) -> int:
    """The shared memory to aim at: several programs an SM keep more bytes in flight than one with a deeper pipeline,
    and with three per SM the 384 programs of K=3, D=8192 are one wave of an H100 at T <= 16."""
    if isinstance(gpu.arch, str):
        return 32 << 10  # half of a CDNA3 unit's; its pipeline passes through registers and gains nothing from depth
    if gpu.shared_memory > 200 << 10:
        return (110 if tiles.swap else 82) << 10  # 2 and 3 programs; mma.sync leaves one stage of these unused
    if gpu.shared_memory > 150 << 10:
        return 80 << 10
    return (48 if tiles.BT <= 32 else 96) << 10


def _block(gpu: Gpu, T: int, dtype: torch.dtype) -> tuple[int, int, bool, int]:
    """(BT, BD, swap, num_warps)."""
    if dtype == torch.float32:
        return 16, 64, False, 8
    if T <= 32:
        return (16, 64, False, 4) if T <= 16 else (32, 64, False, 8)
    BT = 64 if T <= 64 else 128
    if gpu.arch in (90, 100, 103):
        # wgmma and tcgen05 need 64 or 128 rows in the left operand, the weight. 128, as x is read D / BD times.
        return BT, 128, True, 4 if gpu.arch != 90 and BT == 64 else 8
    return BT, 64, False, 4 if BT == 64 else 8


def _splits(K: int, H: int, D: int, BD: int, BK: int) -> int:
    """Parts of a chunk: the fewest for _WANTED_PROGRAMS, or a divisor of its blocks below twice as many."""
    blocks = -(-H // BK)
    wanted = min(blocks, -(-_WANTED_PROGRAMS // (K * max(-(-D // BD), 1))))
    return next((splits for splits in range(wanted, 2 * wanted) if blocks % splits == 0), wanted)


def stage_bytes(tiles: Tiles, dtype: torch.dtype, has_residuals: bool) -> int:
    """Shared memory of one pipeline stage: the tiles of x, of the residual, of the weight."""
    return (tiles.BT * (1 + has_residuals) + tiles.BD) * tiles.BK * dtype.itemsize
