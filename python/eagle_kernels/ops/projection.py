"""What norm_concat_linear does with the normed concat x: its record, its checks and its formula.

out[i] = post_norm(x[i] @ weight^T + bias)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from .sources import Sources, rstd_of

OP = "norm_concat_linear"


class Projection(NamedTuple):
    """What follows the sources, in the order of the registered ops' schema."""

    weight: Tensor  # [D, K*H]
    bias: Tensor | None
    post_norm_weight: Tensor | None
    post_norm_eps: float

    @property
    def is_product(self) -> bool:
        """Whether nothing follows the product."""
        return self.bias is None and self.post_norm_weight is None

    def check(self, sources: Sources) -> None:
        weight, bias, post_norm_weight, post_norm_eps = self
        checks.check_operand(OP, "weight", weight, sources.chunks[0], "chunks[0]")
        if weight.dim() != 2 or weight.shape[1] != sources.width:
            raise checks.shape_error(OP, "weight", weight, expected_weight(sources))
        check_epilogue(sources, weight.shape[0], bias, post_norm_weight, post_norm_eps)
        checks.check_inference(OP, (weight, bias, post_norm_weight))


def expected_weight(sources: Sources) -> str:
    """The weight's shape that fits the sources, as error messages write it."""
    K, width = sources.num_chunks, sources.width
    split = f"K={K} chunks of H={width // K}" if width % K == 0 else f"{K} chunks"
    return f"(D, K*H) = (*, {width}) for {split}"


def check_epilogue(
    sources: Sources, columns: int, bias: Tensor | None, post_norm_weight: Tensor | None, post_norm_eps: float
) -> None:
    """Raise the error message for a bias or a post norm that does not fit D = columns."""
    for name, vector in (("bias", bias), ("post_norm_weight", post_norm_weight)):
        if vector is not None:
            checks.check_vector(OP, name, vector, columns, "D", sources.chunks[0], "chunks[0]")
    if post_norm_weight is not None:
        checks.check_eps(OP, "the post norm's eps", post_norm_eps)


def eps_name(post_norm_weight: Tensor | None) -> str:
    return "eps" if post_norm_weight is None else "eps without the post norm's"


@torch.no_grad()
def project_formula(normed: Tensor, projection: Projection, norm_offset: float) -> Tensor:
    """post_norm(normed @ weight^T + bias) in the dtype of `normed` or float64, unrounded."""
    weight, bias, post_norm_weight, eps = projection
    # Under torch.set_float32_matmul_precision("medium") oneDNN rounds fp32 operands to bf16, 3 bits less than fp16 has.
    precision = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]  # set when it is imported
    if normed.is_cpu and precision == "bf16":
        normed = normed.double()
    projected = normed @ weight.to(normed.dtype).t()
    if bias is not None:
        projected = projected + bias.to(normed.dtype)
    if post_norm_weight is None:
        return projected
    rstd = rstd_of(projected.square().mean(-1, keepdim=True), eps)
    return projected * rstd * (post_norm_weight.to(normed.dtype) + norm_offset)
