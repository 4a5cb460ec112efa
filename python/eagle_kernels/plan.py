"""Which kernel runs a call, and why: a `Plan`, made here from one description of the call, a `Problem`.

Pure functions of the problem, the machine and the environment, so that `explain` can print them. Nothing below a plan
chooses: the primitives and launchers run what they are told.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from . import environment, library
from .checks import DTYPES, error
from .tuned_configs import Tiles, choose_tiles, gpu_of, invariant_rows

_warn_once = functools.cache(logging.getLogger("eagle_kernels").warning)

SETTINGS = environment.read_settings()

# In order of preference; `reference` is plain torch and runs wherever torch does. CUDA comes before Triton because the
# host takes 1.4 to 2.5 times as long for a call of Triton's: 7.6 us instead of 3.3 for capture_hidden, 12.2 instead of
# 7.0 for norm_concat_linear (bench/results/*/host_launches.json). Times of the kernels are at cuda_projection.
_PREFERENCE = {"cpu": ("cpu", "reference"), "cuda": ("cuda", "triton", "reference")}
_DEFAULT_PREFERENCE = ("reference",)
COMPILED = ("cpu", "cuda")  # the backends behind `library.primitives`, which picks by the tensors' device
_caches: list[functools._lru_cache_wrapper] = []


class Kernel(Enum):
    """What a plan runs inside its backend."""

    SINGLE = "one kernel"
    FUSED = "fused"  # norm_concat_linear in one pass over the weight
    DOTS = "fused dots"  # the same for few rows on a CPU: rows of the weight are read from end to end
    WGMMA = "fused wgmma"  # the same with sm_90a's wgmma instructions, for more rows
    SPLIT = "split"  # the same in two launches, partial sums and a finalize kernel
    TWO_STEP = "norm_concat + linear"
    TORCH = "plain torch"


@dataclass(frozen=True)
class Plan:
    """What one call would run."""

    op: str
    backend: str
    kernel: Kernel
    reason: str
    tiles: Tiles | None = None  # of Triton's Kernel.SPLIT
    aligned: bool = False  # Triton's kernel may copy 16 bytes at a time
    isa: str | None = None  # of Kernel.FUSED and Kernel.DOTS on the CPU

    @property
    def is_one_pass(self) -> bool:
        """Whether a CPU's kernel reads the weight itself, in place of torch's product."""
        return self.kernel in (Kernel.FUSED, Kernel.DOTS)

    @property
    def method(self) -> str:
        """The kernel with what was chosen for it, as `explain` prints it."""
        if self.tiles is not None:
            return f"{self.kernel.value} {self.tiles.BT}x{self.tiles.BD}x{self.tiles.BK}"
        return self.kernel.value if self.isa is None else f"{self.kernel.value} {self.isa}"

    def __str__(self) -> str:
        return f"{self.op}: {self.backend}/{self.method}, because {self.reason}"


class Problem(NamedTuple):
    """What the plan of a call depends on. Ops with a single kernel leave out everything after `num_chunks`."""

    op: str
    device: torch.device
    num_chunks: int = 1
    rows: int = 0  # N
    dtype: torch.dtype = None  # type: ignore[assignment]  # None for ops that leave it out, where nothing reads it
    columns: int = 0  # D
    widths: tuple[int, ...] = ()  # the distinct widths of the chunks
    has_residuals: bool = False
    has_post_norm: bool = False
    bytes_aligned: bool = True  # every address and row stride is a multiple of 16 bytes
    elements_aligned: bool = True  # addresses are multiples of 16 bytes, row strides of 16 elements: Triton's terms
    block_rows: int = 0  # rows of a quantized weight that share a scale
    block_columns: int = 0  # its columns that share a scale
    in_blocks: bool = False  # a row of it has several scales
    scales_sums: bool = False  # scales multiply the sums over a block's columns, not the codes
    code_bits: int = 8
    has_int8: bool = False  # codes are int8
    has_e8m0: bool = False  # scales are powers of two
    scales_aligned: bool = True  # the address of the scales and their row stride are multiples of 4 bytes


def cached(function: Callable) -> Callable:
    """Cache the results of a function of hashable arguments until `clear`."""
    wrapped = functools.lru_cache(maxsize=4096)(function)
    _caches.append(wrapped)
    return wrapped


def clear() -> None:
    """Read the environment again and drop all cached choices; for tests and the benchmark."""
    global SETTINGS
    SETTINGS = environment.read_settings()
    for cache in _caches:
        cache.cache_clear()


def unsupported_reason(backend: str, device: torch.device) -> str | None:
    """Why `backend` cannot run on tensors of this device; None where it can."""
    if backend == "reference":
        return None
    if backend == "cpu":
        return f"the tensors are on {device.type}" if device.type != "cpu" else library.unsupported_reason
    return _triton_unsupported_reason(device) if backend == "triton" else _cuda_unsupported_reason(device)


def _cuda_unsupported_reason(device: torch.device) -> str | None:
    if library.unsupported_reason is not None:
        return library.unsupported_reason
    if not library.cuda_archs:
        return "this build has no cuda kernels"
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    if torch.version.hip is not None:
        return "the GPU is AMD's"
    if (reason := _driver_unsupported_reason()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if not any(runs_on(arch, capability) for arch in library.cuda_archs):
        archs = ", ".join(library.cuda_archs)
        return f"this build has kernels for {archs}, and the GPU has compute capability {capability[0]}.{capability[1]}"
    return None


def _driver_unsupported_reason() -> str | None:
    """Why every call of the library's CUDA runtime would fail on this driver, even if torch's own runtime works.

    A runtime works with every driver of its major version or a later one.
    """
    needed, driver = library.CUDA_RUNTIME_VERSION // 1000, library.cuda_driver_version()
    if driver // 1000 >= needed:
        return None
    served = f"CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else "no CUDA"
    newer = f"CUDA {needed}.0" + (" (driver 580)" if needed == 13 else "")
    reason = f"this build needs a driver for {newer} or newer, and this one serves {served}"
    _warn_once(f"the CUDA kernels are left out: {reason}")
    return reason


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: PTX on all later ones, machine code on later minors, `90a` on 9.0 alone.

    >>> runs_on("80", (8, 9)), runs_on("90a", (10, 0)), runs_on("90+ptx", (10, 3))
    (True, False, True)
    """
    major, minor = divmod(int(arch.rstrip("a+ptx")), 10)
    if arch.endswith("+ptx"):
        return capability >= (major, minor)
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


def _triton_unsupported_reason(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:  # found, not imported: an import costs 0.2 s
        return "triton is not installed"
    if device.type == "cpu":
        return None if SETTINGS.triton_interpret else "it takes CPU tensors under TRITON_INTERPRET=1 only"
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, and the kernels need 8.0: cp.async and bf16"
    return None


@cached
def choose_backend(op: str, device: torch.device, num_chunks: int = 1) -> tuple[str, str]:
    """The backend for `op` on this device and the reason; raises where a forced backend cannot be used."""
    backend, reason = _wanted_backend(op, device, num_chunks)
    if op == "store_context_kv" and backend == "cuda":
        backend, reason = "triton", "no cuda kernel stores context KV"
        if (unsupported := unsupported_reason("triton", device)) is not None:
            backend, reason = "reference", f"{reason}; triton: {unsupported}"
    return backend, reason


def _wanted_backend(op: str, device: torch.device, num_chunks: int) -> tuple[str, str]:
    """Forced, or the fastest of those that run here."""
    if SETTINGS.wrong is not None:
        raise ValueError(SETTINGS.wrong)

    def unsupported(backend: str) -> str | None:
        if (reason := unsupported_reason(backend, device)) is None and backend == "cuda":
            limit = library.MAX_CUDA_CHUNKS
            return f"K={num_chunks} > {limit} chunks" if num_chunks > limit else None
        return reason

    forced = SETTINGS.backend
    if forced is not None:
        if (reason := unsupported(forced)) is not None:
            supported = [name for name in environment.BACKENDS if unsupported(name) is None]
            raise error(RuntimeError, op, f"EAGLE_KERNELS_BACKEND is {forced!r}", f"one of {supported}", reason)
        return forced, f"EAGLE_KERNELS_BACKEND={forced}"
    # A build without kernels was asked for; one that does not load was not.
    if device.type in COMPILED and library.unsupported_reason is not None and library.COMPILED_LIBRARY.exists():
        _warn_once(f"the compiled kernels are left out: {library.unsupported_reason}")
    rejected: list[str] = []
    for backend in _PREFERENCE.get(device.type, _DEFAULT_PREFERENCE):
        if (reason := unsupported(backend)) is None:
            return backend, "; ".join(rejected) or f"it is the fastest backend for {device.type} tensors"
        rejected.append(f"{backend}: {reason}")
    raise AssertionError("the reference backend is always supported")


@cached
def choose(*problem: Any) -> Plan:
    """The plan of a call from the fields of its `Problem`. A cached call need not build one: 0.2 us instead of 0.5.

    Raises RuntimeError where a forced backend cannot run it.
    """
    return _choose(Problem(*problem))


def _choose(problem: Problem) -> Plan:
    backend, reason = choose_backend(problem.op, problem.device, problem.num_chunks)
    isa = ""
    if backend == "cpu":
        isa = cpu_isa()  # also sets it: the compiled kernels start out scalar, 3 times slower
    if problem.op == "norm_concat_linear_quantized":
        return quantized_projection(problem, backend, reason, isa)
    if backend == "reference":
        return Plan(problem.op, backend, Kernel.TORCH, reason)
    if problem.op != "norm_concat_linear":
        return Plan(problem.op, backend, Kernel.SINGLE, reason)
    if problem.dtype not in DTYPES:  # the checks that come before this kernel refuse it
        return Plan(problem.op, backend, Kernel.TWO_STEP, f"no kernel multiplies {problem.dtype}")
    if backend == "cpu":
        return cpu_projection(problem, isa)
    return triton_projection(problem) if backend == "triton" else cuda_projection(problem)


def quantized_projection(problem: Problem, backend: str, reason: str, isa: str) -> Plan:
    if backend == "cpu" and problem.code_bits == 12 and problem.dtype != torch.bfloat16:
        backend, reason = "reference", f"no kernel multiplies {problem.dtype} by bf16 in 12 bits"
    if backend == "cpu":
        return _cpu_codes(problem, isa)
    rejected: list[str] = []
    of_many_rows = None  # CUDA's plan, to which Triton's is preferred
    if backend == "cuda":
        rows, max_rows = problem.rows, _max_rows_of_codes(problem)
        if (unsupported := _cuda_codes_unsupported_reason(problem)) is None:
            kernel, why = _cuda_product(problem)
            chosen = Plan(problem.op, "cuda", kernel, f"the codes are widened as they are multiplied; {why}")
            if SETTINGS.batch_invariant or rows <= max_rows:
                return chosen
            widened = f"widen the codes {-(-rows // 64)} times or more"
            unsupported = f"T={rows} > {max_rows}: the split kernels would {widened}"
            if rows <= _MAX_ROWS_WITHOUT_TRITON:
                of_many_rows = replace(chosen, reason=f"T={rows} <= {_MAX_ROWS_WITHOUT_TRITON}: its kernels {widened}")
        rejected.append(f"cuda: {unsupported}")
        if (unsupported := unsupported_reason("triton", problem.device)) is None:
            backend = "triton"
        else:
            rejected.append(f"triton: {unsupported}")
    if backend == "triton":
        if problem.rows > (max_rows := _max_rows_of_codes(problem)) and not SETTINGS.batch_invariant:
            if (unsupported := _dequantizing_unsupported_reason(problem)) is None:
                once = f"T={problem.rows} > {max_rows}: the codes are dequantized once for the "
                return Plan(problem.op, "triton", Kernel.TWO_STEP, "; ".join([*rejected, f"{once}library's product"]))
            rejected.append(f"dequantizing once: {unsupported}")
        if (unsupported := _split_codes_unsupported_reason(problem)) is None:
            plan = _split_codes(problem)
            return replace(plan, reason="; ".join([*rejected, plan.reason]))
        rejected.append(f"triton: {unsupported}")
    if of_many_rows is not None:
        return replace(of_many_rows, reason=f"{rejected[-1]}; {of_many_rows.reason}")
    because = "; ".join(rejected) or reason
    return Plan(problem.op, "reference", Kernel.TORCH, f"the weight is dequantized in every call: {because}")


# Where Triton does not take the codes, the reference dequantizes them in every call of more rows. That is taken to cost
# less than widening them for every 64 rows anew; no saved run has timed it.
_MAX_ROWS_WITHOUT_TRITON = 512

# The max rows of codes that are widened as they are multiplied. An H200 takes, K=3, H=D=4096, in us by the split
# kernels / dequantized once: with an fp32 scale for each block, which takes two matrices and two products, 138 / 162 at
# 160 rows, 219 / 182 at 256. Codes that are multiplied by their scales: nvfp4 52 at 64 rows, 89 at 96 and, dequantized,
# 84 at 160; mxfp8 83, 122 and 88. With a scale for each row, by warpgroups, 65 at 96 rows, dequantized 88 at 160
# (bench/results/nvidia-h200/decode-curve-alternatives.json). No other GPU has timed them.
MAX_ROWS_OF_SCALED_SUMS, _MAX_ROWS_OF_SCALED_CODES, _MAX_ROWS_OF_SCALED_ROWS = 192, 64, 128


def _max_rows_of_codes(problem: Problem) -> int:
    if problem.scales_sums:
        return MAX_ROWS_OF_SCALED_SUMS
    return _MAX_ROWS_OF_SCALED_CODES if problem.in_blocks else _MAX_ROWS_OF_SCALED_ROWS


def _dequantizing_unsupported_reason(problem: Problem) -> str | None:
    """Why Triton does not dequantize the codes once, for the library's product in fp32; None where it does."""
    if problem.code_bits == 12:
        return "no kernel of it reads numbers of 12 bits"
    if torch.version.hip is not None:
        return "torch has no product of 16-bit numbers into fp32 on AMD's GPUs"
    if problem.dtype == torch.float32:
        return "the numbers have 16 bits, and the rows 32"
    if problem.scales_sums and problem.dtype == torch.float16:
        return "a code times the scale of its block may leave the range of torch.float16"
    return None


# csrc/cuda/norm_concat_linear.cu: a copy has 16 codes, and the columns of one step of the product share a scale.
_CUDA_CODES_OF_A_COPY, _CUDA_STEP_COLUMNS = 16, 32


def _cuda_codes_unsupported_reason(problem: Problem) -> str | None:
    """Why CUDA's kernels cannot read the codes; None where they can."""
    shared = problem.block_columns
    if problem.code_bits == 12:
        return "no cuda kernel reads codes of 12 bits"
    if problem.code_bits == 4:
        return _cuda_scaled_codes_unsupported_reason(problem) or cuda_product_unsupported_reason(problem)
    if problem.in_blocks and problem.has_int8:
        return "no cuda kernel reads int8 whose scales are of blocks"
    if problem.in_blocks and (shared < _CUDA_STEP_COLUMNS or shared & (shared - 1)):
        return f"{shared} columns share a scale, and the kernels shift by a power of two from {_CUDA_STEP_COLUMNS} up"
    step = _CUDA_STEP_COLUMNS if problem.in_blocks else _CUDA_CODES_OF_A_COPY
    if odd := [H for H in problem.widths if H % step]:
        return f"H={max(odd)} is no multiple of {step}"
    return cuda_product_unsupported_reason(problem)


def _cuda_scaled_codes_unsupported_reason(problem: Problem) -> str | None:
    """Why CUDA's kernels cannot multiply codes by their scales as they widen them; None where they can."""
    together = 4 * problem.block_columns
    if problem.dtype != torch.bfloat16:
        return f"codes times their scales may leave the range of {problem.dtype}"
    if odd := [H for H in problem.widths if H % together]:
        return f"H={max(odd)} is no multiple of {together}, the columns of four scales, which are copied together"
    if not problem.scales_aligned:
        return "four scales are copied together, and their address or row stride is no multiple of 4 bytes"
    return None


# Processors that multiply bf16 have a second kernel for codes, which sums along K*H (csrc/cpu/project_codes.h).
DOTS_ISAS = ("avx512_bf16", "amx_bf16")


def runs_in_dots(isa: str, rows: int, block_columns: int, code_bits: int) -> bool:
    """Whether the kernel that sums along K*H (DOTS) beats those that multiply strips (FUSED) at this number of rows.

    DOTS multiplies 1, 2, 4 or 8 rows at a time, so 5 and 6 rows cost as much as 8; FUSED has a tile for every number up
    to 12, and multiplies 16 rows or a multiple beyond. With one scale a row DOTS is ahead at 5 and 6 rows all the same.
    With several blocks of 8-bit codes in a row it multiplies the sums of every row by each block's scale, so 5 rows and
    more are left to FUSED. With blocks of 16 columns FUSED multiplies each number by its scale. Medians in ms of DOTS /
    FUSED, called in turn, at K=3, H=D=4096 on an AMD EPYC, two cores, which starts one 512-bit product a cycle:

        rows         5            8            12           16 (FUSED by strips, where now rows are in lanes)
        int8_row     2.5 / 2.5    2.7 / 2.9    4.2 / 4.2
        mxfp8                     3.1 / 3.2
        nvfp4        2.7 / 3.0    2.8 / 3.8    4.2 / 4.9    5.5 / 6.5
        mxfp4        2.7 / 2.2    2.8 / 3.1    4.1 / 4.1    5.4 / 5.3

    On one that starts two:

        rows         5            8            12           16           17           24           32
        int8_row     1.4 / 1.8    1.4 / 2.0    2.2 / 2.2    2.7 / 2.5
        mxfp8                     2.6 / 2.3    3.8 / 2.8    5.0 / 2.8
        nvfp4        1.2 / 1.8    1.2 / 2.2    2.0 / 2.8    2.5 / 4.4    2.8 / 5.0    3.6 / 5.1    5.0 / 5.1
        mxfp4        1.2 / 1.3    1.2 / 1.7    1.9 / 2.2    2.3 / 2.7

    With AMX FUSED uses the tile unit, which multiplies 16 rows at the cost of one. The same on an Intel Xeon at 1 and 2
    rows: fp8_row 1.6 / 1.8, 1.8 / 1.8; one scale for 128 columns 1.7 / 2.0, 2.0 / 2.0; mxfp8 1.8 / 2.0, 2.1 / 2.0;
    mxfp4 1.1 / 1.4, 1.6 / 1.4; nvfp4 1.2 / 1.6, 1.6 / 1.7.
    """
    if isa == "amx_bf16":
        return rows == 1
    if block_columns == 16 and code_bits == 4:
        return rows <= 24
    if rows <= 4 or block_columns > 128:
        return rows <= 8
    return 7 <= rows <= 16 and code_bits == 4


def _cpu_codes(problem: Problem, isa: str) -> Plan:
    if problem.code_bits == 12:
        kernel = Kernel.DOTS if runs_dense_in_dots(problem, isa) else Kernel.FUSED
        why = "; EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T" if SETTINGS.batch_invariant else ""
        reason = f"numbers of 12 bits are widened to bf16, by the kernel that multiplies it{why}"
        return Plan(problem.op, "cpu", kernel, reason, isa=isa)
    if problem.dtype != torch.bfloat16 or isa not in DOTS_ISAS:
        reason = "the codes are widened as they are multiplied"
    elif SETTINGS.batch_invariant:
        reason = "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T"
    elif runs_in_dots(isa, problem.rows, problem.block_columns, problem.code_bits):
        reason = f"T={problem.rows}: rows of codes stream in their order"
        return Plan(problem.op, "cpu", Kernel.DOTS, reason, isa=isa)
    elif isa == "amx_bf16":
        reason = f"T={problem.rows}: the codes are widened once for all rows, which tiles multiply"
    else:
        reason = f"T={problem.rows}: each strip of codes serves all rows"
    return Plan(problem.op, "cpu", Kernel.FUSED, reason, isa=isa)


def _split_codes(problem: Problem) -> Plan:
    T = min(problem.rows, _MAX_TUNED_ROWS)
    plan = triton_projection(problem._replace(rows=T), split_only=True)
    tiles, reason = plan.tiles, f"the codes are widened as they are multiplied; {plan.reason}"
    assert tiles is not None
    # Where sums are scaled, one step of the product has to stay within a block.
    BK = min(tiles.BK, problem.block_columns) if problem.scales_sums else tiles.BK
    return replace(plan, tiles=tiles._replace(BK=BK), reason=reason)


# Why Triton's split kernels cannot run.
_DIFFERENT_WIDTHS = "the chunks differ in width, and the split kernels take one width"
_UNALIGNED = "an address, a row stride or H is no multiple of 16, and the split kernels copy 16 bytes"

# Calls with more rows that are not dequantized once run the plan for this many too. With the tiles for 128 rows the
# kernel for codes with one scale a row spills on sm_120.
_MAX_TUNED_ROWS = 64


def _split_codes_unsupported_reason(problem: Problem) -> str | None:
    """Why the split kernels cannot read the codes; None where they can."""
    if problem.code_bits == 12:
        return "no kernel of it reads numbers of 12 bits"
    if len(problem.widths) != 1:
        return _DIFFERENT_WIDTHS
    H, shared = problem.widths[0], problem.block_columns
    if H % 16 or not problem.elements_aligned:
        return _UNALIGNED
    if shared < problem.num_chunks * H and H % shared:
        return f"H={H} is no multiple of the {shared} columns that share a scale"
    return None


@cached
def cpu_isa() -> str:
    """The instruction set of the compiled CPU kernels on this machine, capped by EAGLE_KERNELS_CPU_ISA."""
    cap = SETTINGS.cpu_isa or environment.CPU_ISAS[-1]
    return environment.CPU_ISAS[library.primitives.set_cpu_isa(environment.CPU_ISAS.index(cap))]


# The largest N at which the fused CPU kernels beat norm_concat + F.linear; None: at every N. Measured at K=3,
# H=D=4096, 2 threads, cold weights, oneDNN and ATen capped to the same instruction set: in bf16 with avx512_bf16 they
# gain 7 % at T=128, 1 % at 192, and lose 2 % at 256 (H=D=2880: gain 17, 8 and 6 %; K=6, H=D=5376: gain 10 and 0 %, lose
# 2 %); in fp32 on an AMD EPYC, for which torch's MKL is not made, they take 59 ms at T=256 and 272 at 1024 where two
# steps take 138 and 565 (H=D=2880: 31 and 142, 67 and 277). Before rows were in lanes (csrc/cpu/project_lanes.h), they
# gained in fp32 on an Intel Xeon 37 % at T=128 and 6 % at 256; with avx2 they take 38.7 ms at T=32 where two steps take
# 47.3, 75.4 and 70.5 at 64. With amx_bf16 they gain in bf16 22 % at T=512, 7 % at 768 and nothing at 1024 (H=D=2880: 8
# % at 512, 5 % at 768); in fp16, for which AMX has no product, 24 % at T=16 and 5 % at 24, and lost 4 % at 32
# (H=D=2880: gain 30, 7 and 0 %). Where the CPU has no 16-bit instructions, torch's 16-bit product takes 3 times as long
# (bf16, avx512, T=256: 352 ms against 136). Scalar code is also what ARM runs, where torch's product may have
# instructions of its own: not measured, so it takes one row only. On x86, capped to SSE, it would be at least twice as
# fast at 1 to 128 rows in 16 bits, and 25 % faster at 16 rows in fp32.
FUSED_ROWS: dict[torch.dtype, dict[str, int | None]] = {
    torch.bfloat16: {"amx_bf16": 768, "avx512_bf16": 192, "avx512": None, "avx2": None, "scalar": 1},
    torch.float16: {"amx_bf16": 24, "avx512_bf16": None, "avx512": None, "avx2": None, "scalar": 1},
    torch.float32: {"amx_bf16": 128, "avx512_bf16": None, "avx512": 128, "avx2": 32, "scalar": 1},
}


# The largest N at which DOTS multiply a dense weight, by instruction set. They read rows of the weight from end to end;
# FUSED reads 128 columns of 32 rows at a time, and multiplies 16 rows or a multiple. Medians in ms of DOTS / FUSED,
# called in turn, two cores of an AMD EPYC that starts two 512-bit products a cycle; one that starts one, or whose cores
# are shared, has no time for rows that are not there. On an Intel processor rows in lanes are not timed:
#
#     rows                 1            4           8          16          20         32          64
#     bf16, 6x5376x5376    10.6 / 11.3  8.3 / 10.4  9.3 / 9.5  11.6 / 9.7                         30.5 / 24.8
#     bf16, 3x4096x4096    3.0 / 3.0    3.1 / 3.1   2.9 / 2.9  3.5 / 2.9                          9.2 / 7.3
#     bf16, 3x2880x2880    1.5 / 1.6    1.4 / 1.3   1.5 / 1.3  1.8 / 1.3                          4.6 / 3.7
#     fp32, 3x4096x4096    5.3 / 7.1    6.1 / 7.0   5.4 / 5.4  7.5 / 5.9   8.7 / 7.8  11.4 / 8.6  22.5 / 15.6
#     fp16, as fp32        2.8 / 4.8    2.8 / 5.0   3.1 / 4.4  4.8 / 4.5   6.0 / 7.6  9.5 / 7.5   19.4 / 14.6
#     bf16, as fp32        3.2 / 4.7                3.4 / 4.7  4.9 / 4.7   7.2 / 7.7  9.5 / 7.7   19.0 / 14.8
DENSE_DOTS_ROWS: dict[torch.dtype, dict[str, int]] = {
    torch.bfloat16: {"avx512_bf16": 8, "avx512": 24},
    torch.float16: {"amx_bf16": 24, "avx512_bf16": 24, "avx512": 24},
    torch.float32: {"amx_bf16": 8, "avx512_bf16": 8, "avx512": 8},
}


def _max_dense_dots_rows(problem: Problem, isa: str) -> int:
    return DENSE_DOTS_ROWS.get(problem.dtype, {}).get(isa, 0)


def runs_dense_in_dots(problem: Problem, isa: str) -> bool:
    """Whether DOTS multiply a dense weight: few rows or, where one kernel has to serve all T, any number."""
    max_rows = _max_dense_dots_rows(problem, isa)
    return max_rows > 0 and (problem.rows <= max_rows or SETTINGS.batch_invariant)


def cpu_projection(problem: Problem, isa: str) -> Plan:
    kernel = Kernel.DOTS if runs_dense_in_dots(problem, isa) else Kernel.FUSED
    fused = functools.partial(Plan, problem.op, "cpu", kernel, isa=isa)
    if SETTINGS.batch_invariant:
        return fused("EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T")
    if kernel is Kernel.DOTS:
        few = _max_dense_dots_rows(problem, isa)
        return fused(f"T={problem.rows} <= {few}: reading the weight from end to end is the bound")
    limit = FUSED_ROWS[problem.dtype][isa]
    if limit is None:
        return fused(f"torch's {problem.dtype} product is slow on {isa}, at every T")
    if problem.rows <= limit:
        return fused(f"T={problem.rows} <= {limit}: one pass over the weight is the bound")
    if problem.has_post_norm and problem.dtype.itemsize == 2 and limit > 1:
        # K=6, H=D=5376, T=512: 504 ms; 1960 with a product of fp32 operands; 465 in eager, which rounds between.
        return fused("a post norm reads the sums before they are rounded, which torch's product does in fp32 alone")
    reason = f"T={problem.rows} > {limit}: oneDNN's product is faster there"
    return Plan(problem.op, "cpu", Kernel.TWO_STEP, reason)


def cuda_projection(problem: Problem) -> Plan:
    """C++ before Triton, whose calls cost the host 1.4 to 2.5 times as much.

    On an H100, us of CUDA / Triton at T = 1 to 16, K=3, calls back to back: H=D=4096 39.8 to 41.0 / 39.6 to 40.7, 2880
    24.2 to 24.9 / 31.3 to 33.4, 896 6.8 to 7.0 / 5.7 to 6.6; CUDA takes 0.7 to 1.3 less since the blocks of a cluster
    send their sums. Where Triton's plan would be two steps, C++ runs them: it writes the normed rows, and applies what
    needs the library product's sums before they are rounded, a post norm or a bias in fp32.
    """
    rows = problem.rows
    reason = cuda_product_unsupported_reason(problem)
    if reason is None:
        kernel, why = _cuda_product(problem)
        max_rows = _ONE_PASS_ROWS.get(kernel, rows)
        if kernel is Kernel.WGMMA:
            max_rows = _max_rows_of_wgmma(problem, max_rows)
        if rows <= max_rows or SETTINGS.batch_invariant:
            return Plan(problem.op, "cuda", kernel, why)
        slower = f"T={rows} > {max_rows}: the library's product is faster there"
        return Plan(problem.op, "cuda", Kernel.TWO_STEP, slower)
    if SETTINGS.backend != "cuda" and unsupported_reason("triton", problem.device) is None:
        plan = triton_projection(problem)
        if plan.kernel is not Kernel.TWO_STEP:
            return replace(plan, reason=f"cuda: {reason}; {plan.reason}")
        reason = f"{reason}; {plan.reason}"
    return Plan(problem.op, "cuda", Kernel.TWO_STEP, reason)


# The max rows for which one pass over a dense weight beats norm_concat and the library's product. On an H100, K=3, us
# in one pass / in two steps, by WGMMA at 32, 64, 96 and 128 rows: H=D=4096 44.5 / 45.0, 48.5 / 46.4, 49.3 / 49.5,
# 53.3 / 46.9; 2880 27.6 / 27.9, 30.5 / 28.2, 36.1 / 29.1, 40.0 / 28.4; 896 7.6 / 10.5, 10.2 / 10.7, 11.3 / 10.9,
# 11.7 / 11.1. By the split kernels, which other GPUs run, at 17 and 32 rows: 4096 52.0 / 44.2, 53.6 / 45.0. With up to
# 16 rows the split kernels have not been timed.
_ONE_PASS_ROWS = {Kernel.WGMMA: 48, Kernel.SPLIT: 16}
# Of a weight of so few numbers: K=3, H=D=896 has 2.4 M, and the next one that was timed 25 M.
_ONE_PASS_ROWS_OF_SMALL, _SMALL_WEIGHT = 64, 4 << 20
_TIMED_GPU = "NVIDIA H200"  # which has timed more than three shapes


def _max_rows_of_wgmma(problem: Problem, max_rows: int) -> int:
    width, gpu = max(problem.widths), gpu_of(problem.device)
    if problem.num_chunks * width * problem.columns <= _SMALL_WEIGHT:
        return max(max_rows, _ONE_PASS_ROWS_OF_SMALL)
    # Of the splits that a GPU has clusters for, none may be good: 17 rows of H=D=5120 take an H200 55.4 us in the best
    # one and 47.5 in two steps, 5376 58.0 and 49.5. Other shapes take 1.7 to 5.8 us less in one pass. Other GPUs, which
    # read at other rates, have not timed such shapes.
    is_timed = gpu.name == _TIMED_GPU and problem.block_columns == 0 and len(problem.widths) == 1
    if is_timed and not library.wgmma_pays(problem.num_chunks, width, problem.columns, gpu.multiprocessors):
        return library.MAX_CUDA_DECODE_ROWS
    return max_rows


def _cuda_product(problem: Problem) -> tuple[Kernel, str]:
    """The CUDA kernel of the product, and the reason for it."""
    rows, decode = problem.rows, library.MAX_CUDA_DECODE_ROWS
    if SETTINGS.batch_invariant:
        return Kernel.SPLIT, "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T"
    if problem.has_post_norm:
        return Kernel.SPLIT, "a post norm needs all D columns of a row in one place"
    few = _FEW_ROWS_OF_CODES[problem.in_blocks] if problem.block_columns else decode
    if rows > few and _wgmma_takes(problem):
        return Kernel.WGMMA, f"T={rows}: one pass over the weight, whose products are those of warpgroups"
    if rows <= decode and has_clusters(problem.device):
        sizes = (problem.block_rows, problem.block_columns, *problem.widths)
        in_tiles = not problem.in_blocks or all(size % _FUSED_CODES == 0 for size in sizes)
        if in_tiles or _fused_scales_codes(problem):
            return Kernel.FUSED, f"T={rows} <= {decode}: one pass over the weight is the bound"
        return Kernel.SPLIT, f"a tile of {_FUSED_CODES} rows and columns of the fused kernel has one scale"
    return Kernel.SPLIT, f"T={rows}: one pass over the weight, then over its sums"


# csrc/cuda/norm_concat_linear.cu: rows and columns of the weight in a tile of the fused kernel, which has one scale.
_FUSED_CODES = 64

# csrc/cuda/norm_concat_linear_wgmma.cu: the columns of a stage of codes share a scale.
_WGMMA_CODES = 128
# So many rows of codes are left to the other kernels, by whether scales are of blocks. With a scale for each row an
# H200 takes 28.3 us for 17 rows of 3x4096x4096, 36.1 by the split kernels; 3x2880x2880 20.4 and 23.8. With scales of
# blocks the split kernels take 38.1 for 32 rows of 4096, warpgroups 38.2 for 48.
_FEW_ROWS_OF_CODES = {False: 16, True: 32}


def _fused_scales_codes(problem: Problem) -> bool:
    """Whether the fused kernel multiplies the codes by their scales: those of 4 bits, and MXFP8's without residuals,
    beside which its ring would have no room for scales."""
    if problem.code_bits == 4:
        return True
    is_mxfp8 = problem.has_e8m0 and (problem.block_rows, problem.block_columns) == (1, 32)
    return is_mxfp8 and not problem.has_residuals and _cuda_scaled_codes_unsupported_reason(problem) is None


def _wgmma_takes(problem: Problem) -> bool:
    """Whether WGMMA reads the weight: a dense one, or for bf16 rows codes in no blocks or in blocks of whole stages."""
    if not has_wgmma(problem.device):
        return False
    if problem.block_columns == 0:
        return True
    whole = all(size % _WGMMA_CODES == 0 for size in (problem.block_columns, *problem.widths))
    return problem.dtype == torch.bfloat16 and (whole or not problem.in_blocks)


def has_wgmma(device: torch.device) -> bool:
    """Whether the GPU has wgmma, which is sm_90 alone, and the library code for sm_90a, which alone may use it.

    The emulation on a CPU has both."""
    is_hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) == (9, 0)
    return is_hopper and "90a" in library.cuda_archs


def has_clusters(device: torch.device) -> bool:
    """Whether blocks can access each other's shared memory, where single-launch kernels combine their sums. In the
    emulation on a CPU they can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def cuda_product_unsupported_reason(problem: Problem) -> str | None:
    if problem.dtype == torch.float32:
        return "tensor cores multiply 16-bit types"
    if odd := [H for H in problem.widths if H % 8]:
        return f"H={max(odd)} is no multiple of 8"
    if not problem.bytes_aligned:
        return "an address or a row stride is no multiple of 16 bytes"
    return None


def triton_projection(problem: Problem, split_only: bool = False) -> Plan:
    invariant = SETTINGS.batch_invariant
    T = invariant_rows(problem.dtype) if invariant else problem.rows
    H = max(problem.widths)
    aligned = problem.elements_aligned and H % 16 == 0
    # The bits of a library's product depend on T: batch invariance excludes it even if a table has it as the fastest.
    tiles, reason = choose_tiles(
        gpu_of(problem.device),
        T,
        problem.num_chunks,
        H,
        problem.columns,
        problem.dtype,
        has_residuals=problem.has_residuals,
        split_only=invariant or split_only,
    )
    if invariant:
        reason = "EAGLE_KERNELS_BATCH_INVARIANT=1 wants one plan for all T"
    if len(problem.widths) > 1:
        tiles, reason = None, _DIFFERENT_WIDTHS
    elif not aligned and not invariant:
        tiles, reason = None, _UNALIGNED
    elif not aligned and tiles is not None:
        tiles = tiles._replace(num_warps=8)  # an address for every element: registers of 4 warps spill
    kernel = Kernel.TWO_STEP if tiles is None else Kernel.SPLIT
    return Plan(problem.op, "triton", kernel, reason, tiles, aligned)
