"""A drafter's projection on the engine's own modules: y = post_norm(fc(chunk_norm(concat_norm(cat of K chunks)))).

`Eagle3Projection` owns its parameters. Here the engine owns them, has loaded them and will load them again when weights
are updated in place (RL): every call reads them from its modules, nothing is packed or folded, nothing can be stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.norm_concat import concatenate
from ..ops.norm_concat_linear import Projection, project
from ..ops.sources import Sources
from ..warmup import warmup


@dataclass(frozen=True, eq=False)
class EngineProjection:
    """Its modules are the engine's; norms have `weight` and `variance_epsilon`, as vLLM's and SGLang's RMSNorm."""

    fc: Any
    num_chunks: int | None  # of a packed input; None where there is no norm and only its width counts
    concat_norm: Any = None
    chunk_norms: Sequence[Any] = ()
    post_norm: Any = None
    norm_offset: float = 0.0
    fc_unsupported: str | None = None  # why the ops cannot read fc.weight; fc then runs itself, behind norm_concat

    @property
    def has_norm(self) -> bool:
        return self.concat_norm is not None or len(self.chunk_norms) > 0

    @property
    def op(self) -> str:
        return "norm_concat_linear" if self.fc_unsupported is None else "norm_concat"

    def forward(self, chunks: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
        """[N, D] from K tensors [N, H] or one packed [N, K*H] ([D] from [K*H]); in `out` where fc's weight is read."""
        norm, owners, eps = self._norm
        if norm == "chunk" and self.concat_norm is not None:
            # Two norms in a row: the first is written out, as the engines do, and the second one reads it.
            chunks = concatenate(self._sources("norm_concat", chunks, *_concat_norm(self.concat_norm)))
        if self.fc_unsupported is not None:
            projected = self.fc(concatenate(self._sources("norm_concat", chunks, norm, owners, eps)))
            return projected if self.post_norm is None else self.post_norm(projected)
        sources = self._sources("norm_concat_linear", chunks, norm, owners, eps)
        post_norm_weight, post_norm_eps = None, 0.0
        if self.post_norm is not None:
            post_norm_weight, post_norm_eps = _parameter(self.post_norm), self.post_norm.variance_epsilon
        bias = None if getattr(self.fc, "bias", None) is None else _parameter(self.fc, "bias")
        return project(sources, Projection(_parameter(self.fc), bias, post_norm_weight, post_norm_eps), out)

    __call__ = forward

    @property
    def _norm(self) -> tuple[str, Sequence[Any], list[float]]:
        """(norm, the modules whose weights are its gains, eps) in front of fc."""
        if self.chunk_norms:
            return "chunk", self.chunk_norms, [norm.variance_epsilon for norm in self.chunk_norms]
        return _concat_norm(self.concat_norm)

    def _sources(
        self,
        op: str,
        chunks: Sequence[Tensor] | Tensor,
        norm: str,
        owners: Sequence[Any],
        eps: list[float],
    ) -> Sources:
        each = [_parameter(owner) for owner in owners] or None
        gains = each[0] if each and norm == "concat" else each
        return Sources.of(op, chunks, norm, gains, eps, self.norm_offset, None, None, None, self.num_chunks)


def _concat_norm(norm: Any) -> tuple[str, Sequence[Any], list[float]]:
    return ("none", (), [1e-6]) if norm is None else ("concat", (norm,), [norm.variance_epsilon])


def _parameter(module: Any, name: str = "weight") -> Tensor:
    """The parameter that the module has now; without its gradient, which engines leave on outside inference mode."""
    parameter = getattr(module, name)
    return parameter.data if torch.is_grad_enabled() else parameter


def try_warm_up(projection: EngineProjection, width: int, dtype: torch.dtype, rows: int) -> str | None:
    """Compile now what the projection of [N, width] runs on a GPU for any N up to `rows`.

    A first request is too late, and in the capture of a CUDA graph an uncompiled kernel raises. Returns why it
    fails, and the engine then keeps its own path; None where it works.
    """
    if projection.num_chunks is None or not _on_gpu(projection.fc):
        return None
    try:
        packed = torch.zeros(rows, width, dtype=dtype, device=next(projection.fc.parameters()).device)
        chunks = [chunk.contiguous() for chunk in packed.chunk(projection.num_chunks, -1)]
        # As a module it has `forward`, all that warmup asks for.
        module: Any = projection
        warmup(module, packed)
        warmup(module, chunks, out=torch.empty_like(projection.forward(chunks)))
    except Exception as failure:
        return f"its kernels do not run here: {failure}"
    return None


def _on_gpu(fc: Any) -> bool:
    return next(fc.parameters()).device.type == "cuda"
