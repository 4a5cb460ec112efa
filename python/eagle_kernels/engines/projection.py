"""A drafter's projection on the engine's own modules: y = post_norm(fc(chunk_norm(concat_norm(cat of K chunks)))).

`Eagle3Projection` owns its parameters. Here the engine owns them, has loaded them and will load them again when weights
are updated in place (RL): every call reads them from its modules, nothing is packed or folded, nothing can be stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops import norm_concat, norm_concat_linear
from ..warmup import warmup


@dataclass(frozen=True, eq=False)
class EngineProjection:
    """Norms are modules with `weight` and `variance_epsilon`, as vLLM's and SGLang's RMSNorm have them."""

    fc: nn.Module
    num_chunks: int | None  # of a packed input; None where there is no norm and only its width counts
    concat_norm: nn.Module | None = None
    chunk_norms: Sequence[nn.Module] = ()
    post_norm: nn.Module | None = None
    norm_offset: float = 0.0
    fc_obstacle: str | None = None  # why the ops cannot read fc.weight; fc then runs itself, behind norm_concat

    @property
    def has_norm(self) -> bool:
        return self.concat_norm is not None or len(self.chunk_norms) > 0

    @property
    def op(self) -> str:
        return "norm_concat_linear" if self.fc_obstacle is None else "norm_concat"

    def forward(self, chunks: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
        """[N, D] from K tensors [N, H] or one packed [N, K*H] ([D] from [K*H]); in `out` where fc's weight is read."""
        sources = {"num_chunks": self.num_chunks, "norm_offset": self.norm_offset}
        if self.concat_norm is not None and self.chunk_norms:
            # Two norms in a row: the first is written out, as the engines do, and the second one reads it.
            chunks = norm_concat(chunks, **sources, **self._concat)
        if self.chunk_norms:
            gains = [norm.weight.data for norm in self.chunk_norms]
            norm = {"norm": "chunk", "norm_weight": gains, "eps": [norm.variance_epsilon for norm in self.chunk_norms]}
        else:
            norm = self._concat
        if self.fc_obstacle is not None:
            projected = self.fc(norm_concat(chunks, **sources, **norm))
            return projected if self.post_norm is None else self.post_norm(projected)
        if self.post_norm is not None:
            eps = norm.get("eps", ())
            norm["eps"] = [*(eps if isinstance(eps, list) else [eps]), self.post_norm.variance_epsilon]
            norm["post_norm_weight"] = self.post_norm.weight.data
        bias = getattr(self.fc, "bias", None)
        return norm_concat_linear(
            chunks, self.fc.weight.data, bias=None if bias is None else bias.data, out=out, **sources, **norm
        )

    __call__ = forward

    @property
    def _concat(self) -> dict:
        norm = self.concat_norm
        if norm is None:
            return {"norm": "none", "eps": 1e-6}
        return {"norm": "concat", "norm_weight": norm.weight.data, "eps": norm.variance_epsilon}


def warm_up_obstacle(projection: EngineProjection, width: int, dtype: torch.dtype, rows: int) -> str | None:
    """Compile now what the projection of [N, width] runs on a GPU for any N up to `rows`.

    A first request is too late, and in the capture of a CUDA graph an uncompiled kernel raises. Returns the reason
    where it fails, for the engine to keep its own path.
    """
    if projection.num_chunks is None or not _on_gpu(projection.fc):
        return None
    try:
        packed = torch.zeros(rows, width, dtype=dtype, device=next(projection.fc.parameters()).device)
        chunks = [chunk.contiguous() for chunk in packed.chunk(projection.num_chunks, -1)]
        warmup(projection, packed)
        warmup(projection, chunks, out=torch.empty_like(projection.forward(chunks)))
    except Exception as failure:
        return f"its kernels do not run here: {failure}"
    return None


def _on_gpu(fc: nn.Module) -> bool:
    return next(fc.parameters()).device.type == "cuda"
