"""The layers, in the form that the `kernels` library requires: no __init__, no members but forward and two flags, and
annotations for what forward reads of the module that it is put into.

Inference only. A module that another library has wrapped, quantized or moved to a dtype that the ops do not take raises
the op's own error, as it would in a direct call. The projection and the norms in a layer are read, not called: forward
hooks on them do not run.
"""

from typing import Any

from torch import Tensor, nn

from ... import checks
from ...ops import norm_concat, norm_concat_linear


class RMSNorm(nn.Module):
    """y = x * rsqrt(mean(x^2) + eps) * w, rounded once. transformers' LlamaRMSNorm rounds before the gain as well."""

    can_torch_compile = True
    has_backward = False
    weight: Tensor  # [H]
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[*, H] to [*, H]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        normed = norm_concat([rows], norm_weight=[self.weight.detach()], eps=self.variance_epsilon)
        return normed.view(hidden_states.shape)


class GemmaRMSNorm(nn.Module):
    """y = x * rsqrt(mean(x^2) + eps) * (1 + w), rounded once: transformers' Gemma3RMSNorm."""

    can_torch_compile = True
    has_backward = False
    weight: Tensor  # [H]
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """[*, H] to [*, H]."""
        rows = x.reshape(-1, x.shape[-1])
        normed = norm_concat([rows], norm_weight=[self.weight.detach()], eps=self.eps, norm_offset=1.0)
        return normed.view(x.shape)


class Eagle3Projection(nn.Module):
    """y = fc(cat_k(fc_norm_k(x_k))): the input stage of an EAGLE-3 drafter with a norm per captured layer."""

    can_torch_compile = True
    has_backward = False
    fc: nn.Linear
    fc_norm: Any  # K norms with weight [H] and variance_epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[*, K*H], the captured layers side by side, to [*, D]."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        checks.check_unwrapped("Eagle3Projection", "fc.weight", self.fc)
        bias = self.fc.bias
        projected = norm_concat_linear(
            rows,
            self.fc.weight.detach(),
            norm_weight=[norm.weight.detach() for norm in self.fc_norm],
            eps=[norm.variance_epsilon for norm in self.fc_norm],
            bias=None if bias is None else bias.detach(),
        )
        return projected.view(*hidden_states.shape[:-1], projected.shape[-1])


class MTPProjection(nn.Module):
    """y = eh_proj(cat(enorm(embeds), hnorm(hidden))): the input stage of an MTP / NextN layer."""

    can_torch_compile = True
    has_backward = False
    enorm: Any  # weight [H] and variance_epsilon
    hnorm: Any
    eh_proj: nn.Linear

    def forward(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Two [*, H] to [*, D]."""
        chunks = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (inputs_embeds, hidden_states)]
        norms = (self.enorm, self.hnorm)
        checks.check_unwrapped("MTPProjection", "eh_proj.weight", self.eh_proj)
        bias = self.eh_proj.bias
        projected = norm_concat_linear(
            chunks,
            self.eh_proj.weight.detach(),
            norm_weight=[norm.weight.detach() for norm in norms],
            eps=[norm.variance_epsilon for norm in norms],
            bias=None if bias is None else bias.detach(),
        )
        return projected.view(*hidden_states.shape[:-1], projected.shape[-1])
