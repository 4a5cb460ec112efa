"""Every instance of norm_concat_linear's CUDA kernels, and a model's times on an H200.

`make instances` compiles for sm_90a, asks the launchers (in the emulation, where nothing runs) for the grid of each
shape of a model and T, prints the table and saves it in bench/results/cuda_instances.json. docs/benchmarking.md has the
model.
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
# enum Form of csrc/cuda/ranges.cuh, in its order
FORMS = ("", " e4m3", " e4m3 blocks", " int8", " nvfp4", " mxfp4", " mxfp8")
# The form that multiplies each format; MXFP8's beyond 16 rows is e4m3 blocks.
FORMATS = {"fp8_row": 1, "fp8_block128": 2, "int8_row": 3, "nvfp4": 4, "mxfp4": 5, "mxfp8": 6}
SCALED_COLUMNS = {4: 16, 5: 32, 6: 32}  # of the forms whose scales pass through the ring
SHAPES = sorted({(stage.K, stage.H, stage.D) for model in model_shapes().values() for stage in model.stages})

# An H200. What no data sheet states is an estimate: latency under load, L2, mma.sync's share of the peak, launches.
SMS, CLOCK = 132, 1.755e9
COPY, L2 = 4.3e12, 5.5e12  # bytes/s
LATENCY = 1000 / CLOCK  # s
ISSUE, SHARED, FLOPS = 4 * 0.7, 128, 0.62 * 4096  # per SM and clock: instructions, bytes and FLOP
WGMMA_FLOPS = 0.75 * 4096  # by warpgroups, whose first operand comes from registers
FIRST_LAUNCH, SECOND_LAUNCH = 2e-6, 1.5e-6  # s
CLUSTER_BYTES = 32  # per SM and clock, from another SM's shared memory
CLUSTER_SUM = LATENCY  # two barriers, and between them a read of the others' shared memory
RECEIVED = 16 * 512 + 8 * 64 + 8  # bytes that a block receives from its cluster
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
    squares_per_byte: float  # of those, for squares of x, in warps that have rows (fused: two each)
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
        if "8BFloat16" not in binary.name or "finalize" in binary.name:
            continue
        rows, residual = (int(number) for number in re.findall(r"L[ib](\d+)E", binary.name))
        form, end = (int(re.search(rf"{kind}E(\d)", binary.name)[1]) for kind in ("4Form", "3End"))
        fused = end > 0
        name = (f"split {rows}", "fused", "fused in threes")[end] + FORMS[form]
        columns, value_bytes, source_rows = 64 if fused else 128, _value_bytes(form), rows * (1 + residual)
        wide = fused or (form and source_rows == 32) or form in SCALED_COLUMNS
        stage_columns = 128 if wide else 64
        if fused and form and (value_bytes < 1 or not residual):
            stage_columns = 256
        stage = int(stage_columns * (columns * value_bytes + source_rows * 2 + 4))
        stage += columns * stage_columns // SCALED_COLUMNS[form] if form in SCALED_COLUMNS else 0
        beside = 2 * source_rows * 8 + RECEIVED if fused else source_rows * 8
        stages = ((200 if rows == 128 else (99, 99, 75)[end]) * 1024 - beside) // stage
        in_flight = int((stages - 1) * columns * stage_columns * value_bytes)
        row_warps = 2 if rows == 128 else 1  # which read the same part of the weight
        per_byte, squares = min(_per_byte(code[binary.name], min(rows, 64) // 8, value_bytes))
        sizes = (rows, columns, binary.registers, stages * stage + beside, in_flight)
        name += " residual" if residual else ""
        made[name] = Instance(name, *sizes, round(per_byte * row_warps, 3), round(squares, 3), value_bytes)
    return made


def _value_bytes(form: int) -> float:
    return 2 if form == 0 else 0.5 if form in (4, 5) else 1


def _per_byte(code: str, row_tiles: int, value_bytes: float) -> Iterator[tuple[float, float]]:
    """A warp's instructions per byte of the weight in each loop that multiplies, and those that sum squares. A product
    of 16 x 8 reads 16 x 16 values of the weight, which the products of all tiles of 8 rows share."""
    for issued, products, squares in _loops(code, "HMMA"):
        read = products * 256 * value_bytes / row_tiles
        yield issued / read, squares / read


def _instructions(code: str, product: str) -> list[float]:
    """Those of a warp in each loop that multiplies."""
    return [issued for issued, *_ in _loops(code, product)]


def _loops(code: str, product: str) -> Iterator[tuple[float, int, int]]:
    """A warp's instructions, products, and instructions that sum squares, in each innermost loop that multiplies. Loops
    inside it that do not multiply are left out: few blocks run them. What a branch skips counts half where threads copy
    (half of the warps the weight, the others x), and a quarter where a block of scales of 128 columns ends, after 4
    steps. Warpgroups copy both in every warp."""
    lines = code.splitlines()
    labels = {match[1]: i for i, line in enumerate(lines) if (match := re.match(r"(\.L_x_\d+):", line))}
    loops, share, of_squares = [], dict.fromkeys(range(len(lines)), 1.0), set()
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
        elif "FFMA" in skipped and "LDS.128" in skipped:
            of_squares.update(range(i + 1, to))
    multiplies = {loop for loop in loops if any(product in line for line in lines[slice(*loop)])}
    for begin, end in multiplies:
        inner = {loop for loop in loops if loop != (begin, end) and begin <= loop[0] and loop[1] <= end}
        if not inner & multiplies:
            left_out = {i for loop in inner for i in range(*loop)}
            body = {i: lines[i] for i in range(begin, end) if i not in left_out}
            issued = {i for i, line in body.items() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)}
            products = sum(product in line for line in body.values())
            yield sum(share[i] for i in issued), products, len(issued & of_squares)


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
        per_byte = min(_instructions(code[binary.name], "HGMMA")) / (16 * 128)
        name = f"wgmma {columns}x{rows}{FORMS[form]}" + (" residual" if residual else "")
        sizes = (rows, columns, binary.registers, stages * stage, (stages - 1) * columns * 128)
        made[name] = Instance(name, *sizes, round(per_byte, 3), 0, value_bytes, 128 * warpgroups)
    return made


@dataclass(frozen=True)
class Call:
    """What a launcher asks for, and its time by the model."""

    instance: str
    blocks: int
    waves: float  # of all SMs, each with as many blocks as fit
    busy: float  # share of the SMs that have a block in the last wave
    ranges: int  # partial sums of an output; 1: none
    microseconds: float
    of_floor: float  # relative to one launch and reading the weight at the copy rate


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
    blocks, ranges = launch.grid
    sizes = (launch.shared_bytes, launch.threads)
    (instance,) = (known[name] for name in names if (known[name].shared, known[name].threads) == sizes)
    return modeled(instance, blocks * ranges, ranges, K, H, D, T)


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
    blocks, ranges = launch.grid
    kinds = {"wgmma": r"wgmma \d+x64", "fused": "fused( in threes)?", "split": r"split \d+"}
    pattern = kinds[kernel] + FORMS[form]
    named = (i for name, i in known.items() if re.fullmatch(pattern, name))
    (instance,) = (i for i in named if (i.shared, i.threads) == (launch.shared_bytes, launch.threads))
    return modeled(instance, blocks * ranges, ranges, K, H, D, T)


def modeled(instance: Instance, blocks: int, ranges: int, K: int, H: int, D: int, T: int) -> Call:
    """The time of one call; see docs/benchmarking.md."""
    width = K * H
    weight = instance.value_bytes * D * width
    of_block = weight / blocks
    slots = instance.blocks * SMS
    if instance.one_launch:
        slots = load().clusters_at_once(SMS, ranges, instance.blocks) * ranges
    # The weight's copies, one wave of blocks after another.
    memory, left = 0.0, blocks
    while left > 0:
        resident = min(left, slots)
        memory += resident * of_block / min(COPY, resident * instance.in_flight / LATENCY)
        left -= resident
    through_l2 = (weight * math.ceil(T / instance.rows) + 2 * T * width * math.ceil(D / instance.columns)) / L2
    # Bytes of the weight on the SM with most blocks, each of the longest range. Ranges of the fused kernel cut the
    # concat evenly, those of warpgroups each chunk: there the longest is in a chunk with fewest.
    units = math.ceil(H / instance.unit)
    of_longest = math.ceil(units / (ranges // K)) if instance.wgmma else math.ceil(K * units / ranges)
    longest = min(K * H, of_longest * instance.unit)
    most = max(math.ceil(blocks / SMS), math.ceil(blocks / slots)) * instance.columns * longest * instance.value_bytes
    multiply = most / instance.value_bytes * 2 * instance.rows / (WGMMA_FLOPS if instance.wgmma else FLOPS)
    without_rows = max(0.0, 1 - math.ceil(T / 2) / 8)  # the share of the fused kernel's warps that have none
    execute = most * (instance.instructions_per_byte - instance.squares_per_byte * without_rows) / ISSUE
    # Both operands are written once; x is read by each warp along the columns, the weight by each warp along the rows.
    column_warps, row_warps = (8, 1)
    if instance.wgmma:  # x by each warpgroup, and once more for its squares
        column_warps = instance.columns // 64 + 1
    elif instance.one_launch:
        column_warps = 2
    elif instance.rows == 128:
        column_warps, row_warps = (4, 2)
    values = 2 * (column_warps + 1) * instance.rows + instance.value_bytes * (row_warps + 1) * instance.columns
    shared = most / instance.value_bytes / instance.columns * values / SHARED
    partial = 0 if instance.one_launch else 4 * ranges * T * D
    end = CLUSTER_SUM if instance.one_launch else SECOND_LAUNCH + partial / L2
    if instance.wgmma:  # with fewer rows the barriers' time includes it
        end += min(T, instance.rows) * instance.columns * 4 * 2 / CLUSTER_BYTES / CLOCK
    slowest = max(memory, through_l2 + partial / L2, max(multiply, execute, shared) / CLOCK)
    seconds = FIRST_LAUNCH + LATENCY + slowest + end
    floor = FIRST_LAUNCH + LATENCY + weight / COPY
    last = blocks % slots or slots
    return Call(
        instance=instance.name,
        blocks=blocks,
        waves=round(blocks / slots, 2),
        busy=round(min(1.0, last / SMS), 2),
        ranges=ranges,
        microseconds=round(seconds * 1e6, 1),
        of_floor=round(seconds / floor, 2),
    )


def as_json(known: dict[str, Instance], made: dict[str, Call]) -> dict:
    rows = {name: asdict(instance) | {"blocks_per_sm": instance.blocks} for name, instance in known.items()}
    return {
        "about": "Modeled for an H200 from the sm_90a machine code and the launchers' grids.",
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
    for format in ("", *FORMATS):
        of = f" of {format}" if format else ""
        lines += ["", f"modeled us{of} on an H200 (and times the floor) at T = " + ", ".join(map(str, ROWS))]
        for K, H, D in SHAPES:
            if f"{K}x{H}x{D} T=1 {format}".rstrip() not in made:
                continue
            of_shape = [made[f"{K}x{H}x{D} T={T} {format}".rstrip()] for T in ROWS]
            cells = "".join(f"{call.microseconds:>8.1f} ({call.of_floor:.2f})" for call in of_shape)
            lines.append(f"{f'{K}x{H}x{D}':14}{cells}")
    return "\n".join(lines)


def main() -> int:
    known = instances()
    made = calls(known)
    SAVED.write_text(json.dumps(as_json(known, made), indent=1) + "\n", encoding="utf-8")
    print(table(known, made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
