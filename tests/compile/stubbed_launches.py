"""Run by test_launches.py in a process of its own: every launch of the Triton backend over a stub of the CUDA driver.

What the driver gets is compared with what the launcher was given: each flattened argument, the grid, the threads and
the attribute of programmatic dependent launch. Tensors are the CPU's, whose addresses serve as well.
"""

import ctypes
import importlib
import struct
import sys
from collections.abc import Iterator, Sequence

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
    torch._C._cuda_getDevice = lambda: None  # as CPU tensors say
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
        # A pointer to what is of another dtype: prepared for other operands.
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
    binary = launching._binaries[self.specialisation(promised), None]
    assert self._launchers[promised]._binary is binary, "not the binary of these operands"
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
        # The same signatures but for one thing.
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
        keys, values = rows(2, 9, 2, H // 2)
        rotation = rows(64, H // 2), 0, False, index.int(), index
        record = StoreContextKV(rows(T, 2 * H), rows(H // 2), 1e-6, 0.0, H // 2, *rotation, keys, values)
        store_context_kv(record)
        store_context_kv(record._replace(kv=rows(T, H)))
        store_context_kv(record._replace(kv=rows(T, H), k_norm_weight=torch.rand(H // 2), v_cache=None))
    ek.norm_concat_linear(chunks, ek.quantize(weight, "fp8_row"), norm_weight=gain, out=out)


launch, seen, types_at = launching.Launch.__call__, set(), {}
launching.Launch.__call__ = checked_launch
launching.has_pdl = lambda device: True
plan._triton_unsupported_reason = lambda device: None

for module in (*OPS, "sources"):
    importlib.import_module(f"eagle_kernels.triton_kernels.{module}").address = recorded_address
linear = importlib.import_module("eagle_kernels.triton_kernels.norm_concat_linear")
linear._library_matmul_fp32 = lambda *operands: None  # an overload of CUDA alone
calls()
compiled = len(launching._binaries)
calls()
assert len(launching._binaries) == compiled, "the same calls compile nothing"

print(f"{compiled} binaries of {len(seen)} kernels on Triton {triton.__version__}")
sys.stdout.flush()
