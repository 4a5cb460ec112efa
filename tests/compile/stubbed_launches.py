"""Run by test_launches.py in a process of its own: every launch of the Triton backend over a stub of the CUDA driver.

What the driver gets is compared with what the launcher was given: each flattened argument, the grid, the threads and
the attribute of programmatic dependent launch. Tensors are the CPU's, whose addresses serve as well.
"""

import ctypes
import importlib
import struct
import sys
from collections.abc import Iterator, Mapping

import torch
import triton
from triton.backends.nvidia.driver import CudaDriver

K, H, D = 3, 128, 80
OPS = ("capture_hidden", "add_rms_norm", "norm_concat", "norm_concat_linear", "vocab_parallel_embedding")


def pretend_to_have_a_gpu() -> None:
    torch.version.cuda = "13.0"
    torch.cuda.current_device = lambda: None
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch._C._cuda_getDevice = lambda: 0
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

STUB = ctypes.CDLL("libcuda.so.1")
FORMATS = {"i64": "<q", "fp32": "<f"}


def flatten(types: tuple, arguments: tuple) -> Iterator[bytes]:
    for kind, argument in zip(types, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from flatten(kind, argument)
        elif kind != "constexpr":
            yield struct.pack("<Q", argument.data_ptr()) if kind[0] == "*" else struct.pack(FORMATS[kind], argument)


def checked_launch(
    kernel: object, grid: tuple, arguments: tuple, constants: Mapping, *, num_warps: int = 4, **options: object
) -> None:
    expected = list(flatten(launching.types_of(arguments), arguments))
    STUB.stub_expect(len(expected), (ctypes.c_int * len(expected))(*map(len, expected)))
    before = STUB.stub_launches()
    launch(kernel, grid, arguments, constants, num_warps=num_warps, **options)
    assert STUB.stub_launches() == before + 1
    for position, value in enumerate(expected):
        passed = ctypes.create_string_buffer(8)
        STUB.stub_argument(position, passed)
        assert passed.raw[: len(value)] == value, (kernel.fn.__name__, position, passed.raw, value)
    last = (ctypes.c_int * 8)()
    STUB.stub_last(last)
    assert tuple(last[:4]) == (*grid, 32 * num_warps), tuple(last)
    assert last[4] <= 227 << 10 and tuple(last[5:]) == (1, 6, 1), tuple(last)  # PROGRAMMATIC_STREAM_SERIALIZATION, on
    seen.add(kernel.fn.__name__)


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


launch, seen = launching.launch, set()
plan._triton_unsupported_reason = lambda device: None

for op in OPS:
    module = importlib.import_module(f"eagle_kernels.triton_kernels.{op}")
    module.launch = checked_launch
    module.has_pdl = lambda device: True
linear = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
linear._library_matmul_fp32 = lambda *operands: None  # an overload of CUDA alone
calls()
compiled = len(launching._binaries)
calls()
assert len(launching._binaries) == len(launching._launchers) == compiled, "the same calls compile nothing"
by_driver = [launcher for launcher in launching._launchers.values() if launcher.__name__ == "launch_by_driver"]
assert len(by_driver) == compiled, "a launch went through Triton's launcher"

print(f"{compiled} binaries of {len(seen)} kernels on Triton {triton.__version__}")
sys.stdout.flush()
