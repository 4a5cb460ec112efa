"""Deterministic calls of each op on shared layers, and digests of their bits: `python tests/soak_calls.py FUNCTION`
prints what the function returns in a process of its own, for test_soak.py."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import eagle_kernels as ek
from backends import CPU_ISAS, environment_of
from eagle_kernels import ops
from eagle_kernels.ops.store_context_kv import StoreContextKV, store_context_kv

Outputs = tuple[Tensor, ...]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTIZED = "norm_concat_linear_quantized"
CONTEXT_KV = "store_context_kv"
OPS = (*ops.__all__, QUANTIZED, CONTEXT_KV)
V = 200
THREADS = 8
PATHS = {isa: {"EAGLE_KERNELS_BACKEND": "cpu", "EAGLE_KERNELS_CPU_ISA": isa} for isa in CPU_ISAS}
PATHS["reference"] = {"EAGLE_KERNELS_BACKEND": "reference"}


def calls(op: str, rows: int, width: int, dtype: torch.dtype) -> Callable[[int], Outputs]:
    """The op on the first T of `rows` rows, as a function of T: always the same tensors and modules."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if op == "capture_hidden":
        hidden, residual = random(rows, width), random(rows, width)

        def capture(T: int) -> Outputs:
            out, squares = torch.empty(T, width, dtype=dtype), torch.empty(T)
            return ek.capture_hidden(hidden[:T], residual[:T], out=out, sum_squares=squares), squares

        return capture
    if op == "add_rms_norm":
        hidden, residual, weight = random(rows, width), random(rows, width), random(width)
        return lambda T: ek.add_rms_norm(hidden[:T], residual[:T], weight)
    if op == "vocab_parallel_embedding":
        layer = ek.VocabParallelEmbedding(V, width, scale=1.5, dtype=dtype)
        layer.weight.data.copy_(random(*layer.weight.shape))
        ids = torch.randint(-2, V + 2, (rows,), generator=generator)
        return lambda T: (layer(ids[:T]),)
    if op == CONTEXT_KV:
        return _store_context(rows, width // 2, random)
    chunks = [random(rows, width) for _ in range(3)]
    if op == "norm_concat":
        gains = random(3, width)
        return lambda T: (ek.norm_concat([chunk[:T] for chunk in chunks], norm_weight=gains),)
    config = ek.Eagle3Config(num_chunks=3, target_hidden_size=width, hidden_size=width, eps=1e-6, chunk_norm=True)
    layer = ek.Eagle3Projection(config, dtype=dtype)
    for parameter in layer.parameters():
        parameter.data.copy_(random(*parameter.shape))
    if op == QUANTIZED:
        layer.quantize("fp8_block128")
    return lambda T: (layer([chunk[:T] for chunk in chunks]),)


def _store_context(rows: int, head_dim: int, random: Callable[..., Tensor]) -> Callable[[int], Outputs]:
    """Two heads into as many slots as rows, in reverse order; the last rows are skipped, which leaves zeros."""
    kv, gain = random(rows, 4 * head_dim), random(head_dim)
    cos_sin = random(rows, head_dim, dtype=torch.float32)
    positions, slots = torch.arange(rows), torch.arange(rows).flip(0) - rows // 8

    def store(T: int) -> Outputs:
        k_cache, v_cache = kv.new_zeros(2, rows, 2, head_dim).unbind(0)
        form = (gain, 1e-6, 0.0, head_dim, cos_sin, 0, False)
        store_context_kv(StoreContextKV(kv[:T], *form, positions[:T], slots[:T], k_cache, v_cache))
        return k_cache, v_cache

    return store


def digest(outputs: Outputs) -> str:
    """A digest of the bits, those of NaN included."""
    total = hashlib.sha256()
    for output in outputs:
        total.update(output.contiguous().view(torch.uint8).numpy())
    return total.hexdigest()[:16]


# Enough rows for a second thread in every op, and for both plans of norm_concat_linear.
SIZES = {"rows": 300, "width": 256}
ROWS = (1, 8, 300)


def digests() -> dict[str, str]:
    """The digests by op, dtype and T."""
    return {
        f"{op}-{name}-T{T}": digest(call(T))
        for op in OPS
        for name, dtype in DTYPES.items()
        for call in (calls(op, **SIZES, dtype=dtype),)
        for T in ROWS
    }


def on_every_path() -> dict[str, dict[str, str]]:
    """The digests by instruction set and number of threads."""
    found = {}
    for name, variables in PATHS.items():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with environment_of(**variables):
                found[f"{name} {threads}"] = digests()
    return found


def first_calls() -> dict[str, list[str]]:
    """Digests of the first call of each op in this process, which eight threads make at once."""
    barrier, found = threading.Barrier(THREADS), {}
    with ThreadPoolExecutor(THREADS) as pool:
        for op in OPS:
            call = calls(op, **SIZES, dtype=torch.bfloat16)

            def first(_: int, call: Callable[[int], Outputs] = call) -> str:
                barrier.wait()
                return digest(call(8))

            found[op] = list(pool.map(first, range(THREADS)))
    return found


def in_a_fork() -> dict[str, str]:
    """The digests of a child that was forked while eight threads called the ops."""
    done = threading.Event()

    def work(number: int) -> None:
        call = calls(OPS[number % len(OPS)], **SIZES, dtype=torch.bfloat16)
        while not done.is_set():
            call(300)

    with ThreadPoolExecutor(THREADS) as pool:
        workers = [pool.submit(work, number) for number in range(THREADS)]
        digests()
        reading, writing = os.pipe()
        if os.fork() == 0:
            # The child has none of libgomp's threads: with more than one, even torch.add waits for them forever.
            torch.set_num_threads(1)
            os.write(writing, json.dumps(digests()).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            found = json.loads(pipe.read())
        done.set()
        for worker in workers:
            worker.result()
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
