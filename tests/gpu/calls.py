"""One call of each op on static buffers, as an engine would capture it into a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import eagle_kernels as ek
from eagle_kernels.ops.store_context_kv import StoreContextKV, store_context_kv

K, H, V = 3, 2880, 500


@dataclass
class StaticCall:
    """`run` reads `inputs` and writes `outputs`; row i of every output depends on row i of the inputs alone."""

    run: Callable[[], object]
    inputs: list[Tensor]  # [T, ...], float rows or int64 ids
    outputs: list[Tensor]  # [T, ...]
    launches: int = 1
    weights: list[Tensor] = field(default_factory=list)

    def refill(self, seed: int, poisoned_from: int | None = None) -> None:
        """New contents in every input; from row `poisoned_from` on NaN, and ids that no rank has."""
        torch.manual_seed(seed)
        for rows in self.inputs:
            if rows.is_floating_point():
                rows.normal_()
                if poisoned_from is not None:
                    rows[poisoned_from:] = float("nan")
            else:
                rows.random_(-5, V + 5)
                if poisoned_from is not None:
                    rows[poisoned_from:] = 2**40

    def poison(self) -> None:
        for rows in self.outputs:
            rows.fill_(float("nan"))

    def results(self) -> list[Tensor]:
        return [rows.clone() for rows in self.outputs]


def _rows(T: int, width: int = H) -> Tensor:
    return torch.empty(T, width, dtype=torch.bfloat16, device="cuda").normal_()


def _norm_concat(T: int, norm: str) -> StaticCall:
    chunks, residuals = [_rows(T) for _ in range(K)], [_rows(T), None, _rows(T)]
    gain, out = _rows(K) if norm == "chunk" else _rows(1, K * H)[0], _rows(T, K * H)
    inputs = [*chunks, residuals[0], residuals[2]]
    arguments = {"norm": norm, "norm_weight": gain, "residuals": residuals, "out": out}
    return StaticCall(lambda: ek.norm_concat(chunks, **arguments), inputs, [out], weights=[gain])


def _capture_hidden(T: int) -> StaticCall:
    hidden, residual = _rows(T), _rows(T)
    buffer = ek.AuxHiddenStates(T, K, H, device="cuda")
    outputs = [buffer.chunk(1, T), buffer.row_sum_squares(T)[:, 1]]
    return StaticCall(lambda: buffer.capture(1, hidden, residual), [hidden, residual], outputs)


def _vocab_parallel_embedding(T: int) -> StaticCall:
    shard = ek.VocabShard.build(V, tp_rank=1, tp_size=2, org_num_embeddings=V - 3)
    ids = torch.zeros(T, dtype=torch.int64, device="cuda")
    table, out = _rows(shard.rows), _rows(T)
    run = lambda: ek.vocab_parallel_embedding(ids, table, shard, scale=53.7, out=out)  # noqa: E731
    return StaticCall(run, [ids], [out], weights=[table])


def _add_rms_norm(T: int) -> StaticCall:
    hidden, residual, weight = _rows(T), _rows(T), _rows(1)[0]
    out, out_sum = _rows(T), _rows(T)
    run = lambda: ek.add_rms_norm(hidden, residual, weight, norm_offset=1.0, out=out, out_sum=out_sum)  # noqa: E731
    return StaticCall(run, [hidden, residual], [out, out_sum], weights=[weight])


def _store_context_kv(T: int) -> StaticCall:
    n, d, positions = 2, 128, torch.arange(T, device="cuda")
    kv, gain = _rows(T, 2 * n * d), _rows(1, d)[0]
    angles = positions[:, None] * torch.logspace(0, -4, d // 2, device="cuda")
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    caches = [torch.empty(T, n, d, dtype=kv.dtype, device="cuda") for _ in range(2)]
    record = StoreContextKV(kv, gain, 1e-6, 0.0, d, cos_sin, 0, False, positions, positions, *caches)
    return StaticCall(lambda: store_context_kv(record), [kv], caches, weights=[gain])


# By id: what an engine would capture. Add an op here, and every test of test_static_calls.py runs it.
CALLS: dict[str, Callable[[int], StaticCall]] = {
    "norm_concat-chunk": lambda T: _norm_concat(T, "chunk"),
    "norm_concat-concat": lambda T: _norm_concat(T, "concat"),
    "capture_hidden": _capture_hidden,
    "vocab_parallel_embedding": _vocab_parallel_embedding,
    "add_rms_norm": _add_rms_norm,
    "store_context_kv": _store_context_kv,
}
