"""Every instance of norm_concat_linear's CUDA kernels, and what an H200 takes for each shape, by a fit to its runs.

`make instances` compiles for sm_90a, asks the launchers (in the emulation, where nothing runs) for the grid of each
shape of a model and T, prints the table and saves it in bench/results/cuda_instances.json. csrc/cuda/h200.h has the
fit.
"""

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from compile.test_cuda import compiled, instructions, nvcc_version
from cuda_host.build import load
from eagle_kernels.library import MAX_CUDA_DECODE_ROWS
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.quantized_weight import FORMATS as FORMATS_OF_WEIGHTS

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "bench/results/cuda_instances.json"
ROWS = (1, 8, 16, 32, 64, 128)
# enum Form of csrc/cuda/scales.cuh, in its order
FORMS = ("", " e4m3", " e4m3 blocks", " int8", " nvfp4", " mxfp4", " mxfp8")
# The form that multiplies each format; MXFP8's beyond 16 rows is e4m3 blocks.
FORMATS = {"fp8_row": 1, "fp8_block128": 2, "int8_row": 3, "nvfp4": 4, "mxfp4": 5, "mxfp8": 6}
SCALED_COLUMNS = {4: 16, 5: 32, 6: 32}  # of the forms whose scales pass through the ring
SHAPES = sorted({(stage.K, stage.H, stage.D) for model in model_shapes().values() for stage in model.stages})

SMS, CLOCK = 132, 1.755e9  # of an H200
COPY = 4.3e12  # bytes/s
LAUNCH, LATENCY = 2e-6, 1000 / CLOCK  # s, the latter under load; estimates
SM_REGISTERS, SM_SHARED, SM_THREADS, BLOCK_RESERVE = 65536, 228 << 10, 2048, 1 << 10


@dataclass(frozen=True)
class Instance:
    """A template instance in bf16; the sizes are those of a block."""

    name: str
    rows: int
    columns: int
    registers: int
    shared: int  # bytes, for K = 3 chunks
    in_flight: int  # bytes of the weight requested ahead of the product
    instructions_per_byte: float  # of the weight, in the main loop
    value_bytes: float = 2  # of the weight
    threads: int = 256

    @property
    def one_launch(self) -> bool:
        return not self.name.startswith("split")

    @property
    def wgmma(self) -> bool:
        return self.name.startswith("wgmma")

    @property
    def unit(self) -> int:
        """Ranges are multiples of this many columns."""
        fused = self.name.startswith("fused")
        return (256 if self.value_bytes < 2 else 128) if fused else 64 if self.value_bytes == 2 else 128

    @property
    def blocks(self) -> int:
        """Blocks on an SM at once."""
        registers = math.ceil(self.registers / 8) * 8 * self.threads
        return min(SM_REGISTERS // registers, SM_SHARED // (self.shared + BLOCK_RESERVE), SM_THREADS // self.threads)


def instances() -> dict[str, Instance]:
    """By name: `fused`, `split ROWS` or `wgmma COLUMNSxROWS`, then the form of the weight, then `residual`."""
    made = _wgmma_instances()
    binaries, cubin = compiled("norm_concat_linear", "90a")
    code = dict(instructions(cubin))
    for binary in binaries:
        if "8BFloat16" not in binary.name:
            continue
        rows, residual = (int(number) for number in re.findall(r"L[ib](\d+)E", binary.name))
        form, end = (int(re.search(rf"{kind}E(\d)", binary.name)[1]) for kind in ("4Form", "3End"))
        fused = end > 0
        ends = (f"split {rows}", "fused", "fused in threes", "fused in pairs", "fused in wide pairs")
        name, columns = ends[end] + FORMS[form], (128, 64, 64, 64, 96)[end]
        value_bytes, source_rows = _value_bytes(form), rows * (1 + residual)
        wide = fused or (form and source_rows == 32) or form in SCALED_COLUMNS
        stage_columns = 128 if wide else 64
        if fused and form and (value_bytes < 1 or not residual):
            stage_columns = 256
        stage = int(stage_columns * (columns * value_bytes + source_rows * 2 + 4))
        stage += columns * stage_columns // SCALED_COLUMNS[form] if form in SCALED_COLUMNS else 0
        if fused:
            stage = max(stage, 4 * 16 * columns * 4)  # the sums of its warps
        beside = 2 * source_rows * 8 + _received(columns) if fused else source_rows * 8
        stages = int((200 if rows == 128 else (99, 99, 75, 113.5, 113.5)[end]) * 1024 - beside) // stage
        in_flight = int((stages - 1) * columns * stage_columns * value_bytes)
        shared, pair = -(-(stages * stage + beside) // 16) * 16, 2 if end >= 3 else 1
        row_warps = 2 if rows == 128 else 1  # which read the same part of the weight
        per_byte = min(_per_byte(code[binary.name], min(rows, 64) // 8, value_bytes))
        sizes = (rows, columns, binary.registers, pair * shared, pair * in_flight)
        name += " residual" if residual else ""
        made[name] = Instance(name, *sizes, round(per_byte * row_warps, 3), value_bytes, pair * 256)
    return made


def _received(columns: int) -> int:
    """Bytes that a block of the fused kernel receives from its cluster."""
    return (22 if columns == 96 else 16) * 512 + 8 * 64 + 8


def _value_bytes(form: int) -> float:
    return 2 if form == 0 else 0.5 if form in (4, 5) else 1


def _per_byte(code: str, row_tiles: int, value_bytes: float) -> Iterator[float]:
    """A warp's instructions per byte of the weight in each loop that multiplies. A product of 16 x 8 reads 16 x 16
    values of the weight, which the products of all tiles of 8 rows share."""
    for issued, products in _loops(code, "HMMA"):
        yield issued / (products * 256 * value_bytes / row_tiles)


def _loops(code: str, product: str) -> Iterator[tuple[float, int]]:
    """A warp's instructions and products in each innermost loop that multiplies. Loops inside it that do not multiply
    are left out: few blocks run them. What a branch skips counts half where threads copy (half of the warps the weight,
    the others x), and a quarter where a block of scales of 128 columns ends, after 4 steps. Warpgroups copy both in
    every warp."""
    lines = code.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    loops, share = [], dict.fromkeys(range(len(lines)), 1.0)
    for i, line in enumerate(lines):
        match = re.search(r"\bBRA(?:\.\w+)*\s+(?:\S+,\s*)?`\((\.L_x_\d+)\)", line)
        to = labels.get(match[1], i) if match else i
        if to < i:
            loops.append((to, i))
        skipped = "".join(lines[i:to])
        if product in skipped or product == "HGMMA":
            continue
        if "LDGSTS" in skipped:
            share.update(dict.fromkeys(range(i + 1, to), 0.5))
        elif "FFMA" in skipped and "LDG" in skipped:
            share.update(dict.fromkeys(range(i + 1, to), 0.25))
    multiplies = {loop for loop in loops if any(product in line for line in lines[slice(*loop)])}
    for begin, end in multiplies:
        inner = {loop for loop in loops if loop != (begin, end) and begin <= loop[0] and loop[1] <= end}
        if not inner & multiplies:
            left_out = {i for loop in inner for i in range(*loop)}
            body = {i: lines[i] for i in range(begin, end) if i not in left_out}
            issued = [i for i, line in body.items() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
            yield sum(share[i] for i in issued), sum(product in line for line in body.values())


def _wgmma_instances() -> dict[str, Instance]:
    made = {}
    binaries, cubin = compiled("norm_concat_linear_wgmma", "90a")
    code = dict(instructions(cubin))
    for binary in binaries:
        if "8BFloat16" not in binary.name:
            continue
        rows, (warpgroups, residual) = 64, (int(number) for number in re.findall(r"L[ib](\d+)E", binary.name))
        form = int(re.search(r"4FormE(\d)", binary.name)[1])
        columns, value_bytes = 64 * warpgroups, 1 if form else 2
        stage = 128 * (columns + rows * (2 // value_bytes) * (1 + residual)) + 1024
        two_blocks = warpgroups <= 2 and FORMS[form] != " e4m3 blocks" and 3 * stage <= 113 << 10
        stages = (228 // (2 if two_blocks else 1) - 1) * 1024 // stage
        # In a stage a warp multiplies 16 rows of the weight.
        per_byte = min(issued for issued, _ in _loops(code[binary.name], "HGMMA")) / (16 * 128)
        name = f"wgmma {columns}x{rows}{FORMS[form]}" + (" residual" if residual else "")
        sizes = (rows, columns, binary.registers, stages * stage, (stages - 1) * columns * 128)
        made[name] = Instance(name, *sizes, round(per_byte, 3), value_bytes, 128 * warpgroups)
    return made


@dataclass(frozen=True)
class Call:
    """What a launcher asks for, and what an H200 takes for it by the fit, where there is one."""

    instance: str
    blocks: int
    waves: float  # of all SMs, each with as many blocks as fit
    busy: float  # share of the SMs that have a block in the last wave
    ranges: int  # partial sums of an output; 1: none
    microseconds: float | None
    of_floor: float | None  # relative to one launch and reading the weight at the copy rate


def calls(known: dict[str, Instance]) -> dict[str, Call]:
    """By `KxHxD T`: calls with gains, without post norm, residuals or statistics; then calls of codes, by `KxHxD T
    format`."""
    emulation = load()
    emulation.run_kernels(False)
    emulation.set_device(227 << 10, descending_warps=False, multiprocessors=SMS)
    try:
        sizes = [(*shape, T) for shape in SHAPES for T in ROWS]
        dense = {f"{K}x{H}x{D} T={T}": _call(known, emulation, K, H, D, T) for K, H, D, T in sizes}
        return dense | {
            f"{K}x{H}x{D} T={T} {format}": _call_on_codes(known, emulation, K, H, D, T, format)
            for format, form in FORMATS.items()
            for K, H, D, T in sizes
            if form not in (4, 5) or H % (4 * SCALED_COLUMNS[form]) == 0  # the rest is Triton's
        }
    finally:
        emulation.run_kernels(True)


def _call(known: dict[str, Instance], emulation: object, K: int, H: int, D: int, T: int) -> Call:
    ops = torch.ops.eagle_kernels_emulated
    x = torch.empty(T, K * H, dtype=torch.bfloat16)
    weight, gain = x.new_empty(D, K * H), x.new_empty(K, H)
    arguments = ([x], K, 1, [gain], [1e-6], 0.0, None, None, None, weight, None, None, 0.0)
    emulation.take_launches()
    if T <= MAX_CUDA_DECODE_ROWS:
        ops.norm_concat_linear_fused_out(*arguments, True, x.new_empty(T, D))
        names = ("fused", "fused in threes")
    else:
        ops.norm_concat_linear_wgmma_out(*arguments, x.new_empty(T, D))
        names = tuple(name for name in known if re.fullmatch(r"wgmma \d+x64", name))
    (launch,) = (launch for launch in emulation.take_launches() if launch.threads)
    return _call_of([known[name] for name in names], launch, K, H, D, T)


def _call_on_codes(known: dict[str, Instance], emulation: object, K: int, H: int, D: int, T: int, format: str) -> Call:
    x = torch.empty(T, K * H, dtype=torch.bfloat16)
    kind, form = FORMATS_OF_WEIGHTS[format], FORMATS[format]
    block = (kind.block[0], kind.block[1] or K * H)
    codes = torch.empty(D, K * H // kind.columns_per_code, dtype=kind.codes)
    scales = torch.empty(-(-D // block[0]), -(-K * H // block[1]), dtype=kind.scales[0])
    gain = x.new_empty(K, H)
    arguments = ([x], K, 1, [gain], [1e-6], 0.0, None, None, None, codes, scales, None, *block, None, None, 0.0)
    emulation.take_launches()
    in_blocks = format == "fp8_block128"
    kernel = "split" if T > MAX_CUDA_DECODE_ROWS or (in_blocks and H % 64) or (form == 6 and H % 128) else "fused"
    if (32 if in_blocks else MAX_CUDA_DECODE_ROWS) < T and form <= 3 and not (in_blocks and H % 128):
        kernel = "wgmma"
    if kernel == "split" and form == 6:
        form = 2
    torch.ops.eagle_kernels_emulated.norm_concat_linear_quantized_out(
        *arguments, ("split", "fused", "wgmma").index(kernel), True, x.new_empty(T, D)
    )
    launch = next(launch for launch in emulation.take_launches() if launch.threads)
    kinds = {"wgmma": r"wgmma \d+x64", "fused": "fused( in threes| in( wide)? pairs)?", "split": r"split \d+"}
    pattern = kinds[kernel] + FORMS[form]
    return _call_of([i for name, i in known.items() if re.fullmatch(pattern, name)], launch, K, H, D, T)


def _call_of(candidates: list[Instance], launch: object, K: int, H: int, D: int, T: int) -> Call:
    sizes = (launch.shared_bytes, launch.threads * launch.rows)
    (instance,) = (i for i in candidates if (i.shared, i.threads) == sizes)
    blocks, cluster = math.prod(launch.grid), launch.grid[1]
    ranges = cluster * launch.rows
    slots = instance.blocks * SMS
    if instance.one_launch:
        slots = load().clusters_at_once(SMS, cluster, instance.blocks) * cluster
    last = blocks % slots or slots
    us = _fitted_us(instance, ranges, K, H, D, T)
    floor = 1e6 * (LAUNCH + LATENCY + instance.value_bytes * D * K * H / COPY)
    return Call(
        instance=instance.name,
        blocks=blocks,
        waves=round(blocks / slots, 2),
        busy=round(min(1.0, last / SMS), 2),
        ranges=ranges,
        microseconds=us and round(us, 1),
        of_floor=us and round(us / floor, 2),
    )


def _fitted_us(instance: Instance, ranges: int, K: int, H: int, D: int, T: int) -> float | None:
    """Where there is a fit: to one row by the fused kernel, unless scales multiply codes (NVFP4 takes up to a fifth
    longer than it would say), and to 17 rows of a dense weight by warpgroups."""
    units = math.ceil(H / instance.unit)
    in_pairs = "pairs" in instance.name
    # The longest range, where each is of one chunk.
    of_chunk = math.ceil(units / (ranges // K)) if ranges >= K else None
    if instance.wgmma:
        if instance.value_bytes < 2 or T > 48:
            return None
        return load().us_of_warpgroups(D, K * H, instance.columns // 64, ranges, of_chunk)
    if not instance.one_launch or any(FORMS[form] in instance.name for form in SCALED_COLUMNS):
        return None
    is_codes = instance.value_bytes < 2
    # Ranges cut the concat evenly or, where that is faster, of codes each chunk.
    cuts = [(math.ceil(K * units / ranges), ranges % K != 0)] + [(of_chunk, False)] * (is_codes and ranges >= K)
    clusters = math.ceil(D / instance.columns)
    shared = 2 if in_pairs else instance.blocks, in_pairs, instance.columns  # h200.h, FusedBlocks
    return min(
        load().us_of_fused(is_codes, clusters, ranges, *shared, longest, K * units, has_second_part)
        for longest, has_second_part in cuts
    )


def as_json(known: dict[str, Instance], made: dict[str, Call]) -> dict:
    rows = {name: asdict(instance) | {"blocks_per_sm": instance.blocks} for name, instance in known.items()}
    return {
        "about": "From the sm_90a machine code and the launchers' grids; microseconds by a fit to an H200's runs.",
        "nvcc": nvcc_version().decode().split("release ")[1].split(",")[0],
        "instances": rows,
        "calls": {name: asdict(call) for name, call in made.items()},
    }


def table(known: dict[str, Instance], made: dict[str, Call]) -> str:
    lines = [
        f"{'instance (bf16, sm_90a)':24}{'registers':>10}{'shared':>8}{'blocks':>7}{'KB ahead':>12}{'instr/byte':>11}"
    ]
    for i in known.values():
        ahead = i.in_flight * i.blocks // 1024
        lines.append(
            f"{i.name:24}{i.registers:>10}{i.shared:>8}{i.blocks:>7}{ahead:>12}{i.instructions_per_byte:>11.3f}"
        )
    for format in ("", *(format for format, form in FORMATS.items() if form not in SCALED_COLUMNS)):
        of = f" of {format}" if format else ""
        lines += ["", f"us{of} on an H200 by the fit (and times the floor) at T = " + ", ".join(map(str, ROWS))]
        for K, H, D in SHAPES:
            of_shape = [made[f"{K}x{H}x{D} T={T} {format}".rstrip()] for T in ROWS]
            cells = [f"{c.microseconds:.1f} ({c.of_floor:.2f})" if c.microseconds else "-" for c in of_shape]
            lines.append(f"{f'{K}x{H}x{D}':14}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join(lines)


def main() -> int:
    known = instances()
    made = calls(known)
    SAVED.write_text(json.dumps(as_json(known, made), indent=1) + "\n", encoding="utf-8")
    print(table(known, made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
