"""Run by test_launches.py in a process of its own: every launch of the Triton backend over a stub of the CUDA driver.

What the driver gets is compared with what the launcher was given: each flattened argument, the grid, the threads and
the attribute of programmatic dependent launch. What the compiled library launches (csrc/triton_launches.cpp) is
compared with what Python launches for the same operands. Tensors are on the CPU: their addresses serve as well.
"""

import ctypes
import importlib
import mmap
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

K, H, D = 3, 128, 80
OPS = (
    "capture_hidden",
    "add_rms_norm",
    "norm_concat",
    "norm_concat_linear",
    "vocab_parallel_embedding",
    "store_context_kv",
)


def pretend_to_have_a_gpu() -> None:
    torch.version.cuda = "13.0"
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getDevice = lambda: None  # the index of a CPU tensor's device
    torch._C._cuda_getCurrentRawStream = lambda device: 0x5A0
    driver = CudaDriver()
    driver.get_current_device = lambda: 0
    driver.get_device_capability = lambda device=None: (9, 0)
    driver.get_current_stream = lambda device: 0x5A0
    triton.runtime.driver.set_active(driver)


pretend_to_have_a_gpu()

from eagle_kernels.triton_kernels import launch as launching  # noqa: E402

import eagle_kernels as ek  # noqa: E402
from eagle_kernels import plan  # noqa: E402
from eagle_kernels.ops.store_context_kv import StoreContextKV, store_context_kv  # noqa: E402

STUB = ctypes.CDLL("libcuda.so.1")
FORMATS = {"i64": "<q", "fp32": "<f"}


def flatten(types: tuple) -> Iterator[str]:
    for kind in types:
        if isinstance(kind, tuple):
            yield from flatten(kind)
        elif kind != launching.NONE:
            yield kind


def recorded_address(tensor: torch.Tensor) -> int:
    types_at[tensor.data_ptr()] = launching.pointer_to(tensor.dtype)
    return tensor.data_ptr()


def checked_launch(self: launching.Launch, grid: tuple, numbers: Sequence, is_aligned: bool | None = None) -> None:
    kernel, (num_warps, _, _), types = self.kernel, self._options, list(flatten(self.types))
    expected = []
    for kind, number in zip(types, numbers, strict=True):
        # A pointer to another dtype means a launch prepared for other operands.
        assert kind in FORMATS or types_at[number] == kind, (kernel.fn.__name__, kind, types_at[number])
        expected.append(struct.pack(FORMATS.get(kind, "<Q"), number))
    aligned = [kernel.arg_names[path[0]] in self._aligned_together for path, kind in launching._leaves(self.types)
               if kind != launching.NONE]  # fmt: skip
    promised = all(number % 16 == 0 for number, together in zip(numbers, aligned, strict=True) if together)
    assert self.is_aligned(numbers) == promised and is_aligned in (None, promised)
    STUB.stub_expect(len(expected), (ctypes.c_int * len(expected))(*map(len, expected)))
    before = STUB.stub_launches()
    launch(self, grid, numbers, is_aligned)
    assert STUB.stub_launches() == before + 1
    binary = launching._binaries[self.specialization(promised), None]
    assert self.launchers[promised]._binary is binary, "not the binary of these operands"
    for position, value in enumerate(expected):
        passed = ctypes.create_string_buffer(8)
        STUB.stub_argument(position, passed)
        assert passed.raw[: len(value)] == value, (kernel.fn.__name__, position, passed.raw, value)
    last = (ctypes.c_int * 8)()
    STUB.stub_last(last)
    assert tuple(last[:4]) == (*grid, 32 * num_warps), tuple(last)
    assert last[4] <= 227 << 10 and tuple(last[5:]) == (1, 6, 1), tuple(last)  # PROGRAMMATIC_STREAM_SERIALIZATION, on
    seen.add(kernel.fn.__name__)
    made.append(Made((*grid, 32 * num_warps, last[4]), binary.function, expected))


class Made(NamedTuple):
    """A launch: grid, threads and shared memory, the function, and the bytes of each argument."""

    config: tuple[int, ...]
    function: int
    arguments: list[bytes]


def checked_call(self: launching.Launches, operands: tuple, integers: tuple, floats: tuple) -> bool:
    """Launches by the library where it can already, by Python, and by the library again: all three must be alike."""
    products = [step for step in self._steps if getattr(step, "by_torch", None) is linear._library_matmul]
    before = by_library(self, operands, integers, floats)
    results = [operands[step.out].clone() for step in products]
    for step in products:
        operands[step.out].fill_(float("nan"))
    made.clear()
    was_launched = self._launch_each(operands, integers, floats)
    by_python = list(made)
    assert before in (None, by_python)
    after = by_library(self, operands, integers, floats)
    if launching.launch_by_library is not None:
        assert after == (by_python if was_launched else None), (after, by_python)
        counts[was_launched, before is None] += 1
    for step, result in zip(products, results, strict=True):
        assert before is None or torch.equal(operands[step.out].view(torch.uint8), result.view(torch.uint8))
    return was_launched


def by_library(self: launching.Launches, operands: tuple, integers: tuple, floats: tuple) -> list[Made] | None:
    """The library's launches; None where it has left the call to Python."""
    if not self._has_binaries:
        return None
    launched: list[Made] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
    def launch_kernel(config: int, function: int, parameters: Sequence[int], extra: None) -> int:
        step = next(steps)
        config = launching._LaunchConfig.from_address(config)
        assert config.stream == 0x5A0 and config.num_attributes == 1 and extra is None
        assert config.attributes[0].id == 6 and config.attributes[0].value[1] == 1
        kinds = [kind for kind in flatten(step.launch.types)]
        sizes = [struct.calcsize(FORMATS.get(kind, "<Q")) for kind in kinds]
        arguments = [ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)]
        sizes_of_launch = *config.grid, config.block[0], config.shared_bytes
        launched.append(Made(sizes_of_launch, function, arguments))
        return 0

    steps = (step for step in self._steps if isinstance(step, launching.Step))
    driver, self._record[0] = self._record[0], ctypes.cast(launch_kernel, ctypes.c_void_p).value
    done = launching.launch_by_library(self._record_address, operands, integers, floats, 0x5A0)
    self._record[0] = driver
    assert done or not launched
    return launched if done else None


def products_of_the_cpu() -> tuple[int, ...]:
    """In place of CUDA's; the CPU has none of 16-bit operands into fp32."""
    library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
    functions = library.aoti_torch_cpu_mm_out, library.aoti_torch_cpu_addmm_out, mm_dtype
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
def mm_dtype(out: int, a: int, b: int, dtype: int) -> int:
    assert dtype == 6  # fp32's
    return 0


def calls() -> None:
    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16()

    shard = ek.VocabShard.build(64, tp_rank=0, tp_size=1)
    for T in (1, 16, 32, 64, 128, 200):
        chunks, weight, gain, out = [rows(T, H) for _ in range(K)], rows(D, K * H), rows(K, H), rows(T, D)
        residuals, index = [rows(T, H), None, rows(T, H)], torch.zeros(T, dtype=torch.int64)
        ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out)
        indices = [index, None, index.int()]
        more = {"residuals": residuals, "indices": indices, "bias": torch.rand(D)}
        ek.norm_concat_linear(chunks, weight, norm_weight=gain, out=out, **more)
        more = {"norm": "concat", "sum_squares": torch.rand(T, K), "post_norm_weight": rows(D), "num_chunks": K}
        ek.norm_concat_linear(torch.cat(chunks, -1), weight, norm_weight=gain.reshape(-1), out=out, **more)
        ek.norm_concat(chunks, norm_weight=gain, eps=[1e-6, 1e-5, 0.5], norm_offset=1.0)
        ek.capture_hidden(chunks[0], chunks[1], out=rows(T, H), sum_squares=torch.empty(T))
        ek.add_rms_norm(chunks[0], chunks[1], gain[0])
        ek.vocab_parallel_embedding(index, rows(64, H), shard, scale=2.5)
        # Signatures that differ from those above in one thing each.
        ek.norm_concat(chunks, norm_weight=gain.float(), eps=[1e-6, 1e-5, 0.5], norm_offset=1.0)
        ek.norm_concat([chunk.half() for chunk in chunks], norm_weight=gain.half(), eps=[1e-6, 1e-5, 0.5])
        ek.capture_hidden(chunks[0], None, out=rows(T, H), sum_squares=torch.empty(T))
        ek.capture_hidden(rows(T + 1, H).view(-1)[1:][: T * H].view(T, H), chunks[1], out=rows(T, H))
        ek.add_rms_norm(chunks[0], chunks[1], gain[0].float())
        ek.add_rms_norm(chunks[0].float(), chunks[1].float(), gain[0].float())
        ek.add_rms_norm(rows(T, H + 1)[:, 1:], chunks[1], gain[0])
        ek.vocab_parallel_embedding(index.int(), rows(64, H), shard, scale=torch.tensor(2.5).bfloat16())
        ek.norm_concat_linear([rows(T, H + 1)[:, 1:], *chunks[1:]], weight, norm_weight=gain, out=out)
        ek.norm_concat_linear([rows(T, H - 8), rows(T, H + 8), chunks[2]], weight, out=out)
        if T in (16, 200):
            linear_calls(chunks, weight, gain, out, index)
        keys, values = rows(2, 9, 2, H // 2)
        rotation = rows(64, H // 2), 0, False, index.int(), index
        record = StoreContextKV(rows(T, 2 * H), rows(H // 2), 1e-6, 0.0, H // 2, *rotation, keys, values)
        store_context_kv(record)
        store_context_kv(record._replace(kv=rows(T, H)))
        store_context_kv(record._replace(kv=rows(T, H), k_norm_weight=torch.rand(H // 2), v_cache=None))
    for format in ("fp8_row", "fp8_block128", "mxfp4", "nvfp4"):
        ek.norm_concat_linear(chunks, ek.quantize(weight, format), norm_weight=gain, out=out)
    # Two products of each of three slices, the most that the library launches.
    codes, many = ek.quantize(weight, "fp8_block32"), [rows(330, H) for _ in range(K)]
    dequantize._MAX_BYTES = 2 * 2 * 32 * K * H
    ek.norm_concat_linear(many, codes, norm_weight=gain, out=rows(330, D), bias=torch.rand(D))
    dequantize._MAX_BYTES = 128 << 20


def linear_calls(
    chunks: list, weight: torch.Tensor, gain: torch.Tensor, out: torch.Tensor, index: torch.Tensor
) -> None:
    """norm_concat_linear in signatures that differ in one thing each."""
    T = len(out)
    residual = torch.randn(T, H).bfloat16()
    for more in (
        {"norm_weight": gain.float()},
        {"norm_weight": [gain[k] for k in range(K)], "eps": [1e-6, 1e-5, 0.5], "norm_offset": 1.0},
        {"residuals": [residual, None, None]},
        {"residuals": [None, None, residual]},
        {"indices": [index]},
        {"indices": [index, None, index]},
        {"indices": [None, index, index.int()]},
        {"sum_squares": torch.rand(T, K)},
        {"bias": gain.reshape(-1)[:D]},
        {"post_norm_weight": torch.rand(D)},
    ):
        ek.norm_concat_linear(chunks, weight, **{"norm_weight": gain, "out": out} | more)
    packed = torch.cat(chunks, -1)
    ek.norm_concat_linear(packed, weight, norm_weight=gain, num_chunks=K, out=out)
    ek.norm_concat_linear(packed, weight, norm="none", out=out)
    ek.norm_concat_linear(packed[:, : 2 * H], weight[:, : 2 * H], norm_weight=gain[:2], num_chunks=2, out=out)
    ek.norm_concat_linear(chunks, weight[:32], norm_weight=gain, out=out[:, :32])


def calls_of_all_settings() -> None:
    calls()
    os.environ["EAGLE_KERNELS_BATCH_INVARIANT"] = "1"
    plan.clear()
    weight, chunks = torch.randn(D, K * H).bfloat16(), [torch.randn(200, H).bfloat16() for _ in range(K)]
    ek.norm_concat_linear(chunks, weight)
    ek.norm_concat_linear([torch.randn(200, H + 1).bfloat16()[:, 1:], *chunks[1:]], weight)
    del os.environ["EAGLE_KERNELS_BATCH_INVARIANT"]
    plan.clear()
    more_programs_than_a_grid_has()


def more_programs_than_a_grid_has() -> None:
    """Nothing of these 8 GB is ever touched, nor reserved."""
    N, no_reserve = 2**32 + 5, 0x4000  # MAP_NORESERVE, which mmap has from Python 3.13 on
    memory = mmap.mmap(-1, 2 * N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    x, out = torch.zeros(1, 1).bfloat16().expand(N, 1), torch.frombuffer(memory, dtype=torch.bfloat16)[:, None]
    ek.norm_concat([x[:9]], out=out[:9])
    try:
        ek.norm_concat([x], out=out)
    except ValueError as error:
        limit = f"expected at most {2**31 - 1}, because a grid has no more"
        assert str(error) == f"norm_concat: the rows take {N} programs, {limit}", error
    else:
        raise AssertionError("launched with a grid that was cut to 32 bits")


launch, seen, types_at, made = launching.Launch.__call__, set(), {}, []
# Calls of `Launches`, by (Python launched it, the library could not launch it before Python).
counts = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
launching.Launch.__call__, launching.Launches.__call__ = checked_launch, checked_call
launching._torch_products = products_of_the_cpu
launching.has_pdl = lambda device: True
plan._triton_unsupported_reason = lambda device: None

for module in (*OPS, "launch"):
    importlib.import_module(f"eagle_kernels.triton_kernels.{module}").address = recorded_address
dequantize = importlib.import_module("eagle_kernels.triton_kernels.dequantize")
linear = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
linear._library_matmul_fp32 = lambda *operands: None  # an overload that only CUDA has
calls_of_all_settings()
compiled = len(launching._binaries)
counts |= dict.fromkeys(counts, 0)
calls_of_all_settings()
assert len(launching._binaries) == compiled, "the same calls compile nothing"
if launching.launch_by_library is not None:
    assert counts[True, False] > 50 and counts[True, True] == counts[False, False] == 0, counts

print(f"{compiled} binaries of {len(seen)} kernels on Triton {triton.__version__}")
sys.stdout.flush()
