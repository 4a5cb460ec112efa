"""Why a layer of SGLang cannot run on the ops, beyond `eligibility`: its kind of norm, its weight's layout, SGLang's
deterministic mode."""

from typing import Any

import torch
from torch import nn

from ... import plan
from .. import eligibility
from ..eligibility import norm_unsupported_reason


def linear_unsupported_reason(linear: Any, *, bias: bool = False, column_shard: bool = False) -> str | None:
    """`eligibility.linear_unsupported_reason` of a layer of SGLang; SGLang packs a weight for AMX in its own shape."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if getattr(linear, "use_intel_amx_backend", False):
        return "its weight is packed for the engine's own CPU product"
    return eligibility.linear_unsupported_reason(
        linear, {UnquantizedLinearMethod}, bias=bias, column_shard=column_shard
    )


def rms_norm_unsupported_reason(norm: nn.Module, dtype: torch.dtype, *, gemma: bool = False) -> str | None:
    """Why the ops cannot take over a norm: gemma asks for GemmaRMSNorm (gain 1 + w), else RMSNorm (gain w)."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    if getattr(norm, "variance_size_override", None) is not None:
        return f"its norm takes the variance of {norm.variance_size_override} columns only"
    if getattr(norm, "cast_x_before_out_mul", False):
        return "its norm rounds before the gain (cast_x_before_out_mul)"
    if not getattr(norm, "has_weight", True):
        return "its norm has no weight"
    return norm_unsupported_reason(norm, {GemmaRMSNorm if gemma else RMSNorm}, dtype)


def determinism_unsupported_reason() -> str | None:
    """SGLang's deterministic mode wants bits that do not depend on the batch."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    if is_batch_invariant_mode_enabled() and not plan.SETTINGS.batch_invariant:
        return "SGLang's batch-invariant mode is on, and EAGLE_KERNELS_BATCH_INVARIANT is not 1"
    return None
