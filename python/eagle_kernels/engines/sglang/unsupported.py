"""Why a layer of SGLang cannot run on the ops, beyond `eligibility`: its kind of norm, its weight's layout, SGLang's
deterministic mode."""

from typing import Any

import torch
from torch import nn

from ... import plan
from ...checks import DTYPES
from .. import eligibility, engine_codes
from ..eligibility import is_column_shard, norm_unsupported_reason

# The methods that leave the weight in a layout of `engine_codes`.
_QUANTIZED = {"sglang.srt.layers.quantization.fp8:Fp8LinearMethod"}


def linear_unsupported_reason(
    linear: Any, *, bias: bool = False, column_shard: bool = False, codes: bool = False
) -> str | None:
    """`eligibility.linear_unsupported_reason` of a layer of SGLang, which packs a weight for AMX in the same shape.

    codes: whether the weight may be quantized (`read_by_op`).
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if getattr(linear, "use_intel_amx_backend", False):
        return "its weight is packed for the engine's own CPU product"
    if codes and (bias or getattr(linear, "bias", None) is None) and engine_codes.read(linear, _QUANTIZED) is not None:
        # To probe a layer that gathers takes all ranks.
        return "its codes are a shard" if not column_shard and is_column_shard(linear) else None
    return eligibility.linear_unsupported_reason(
        linear, {UnquantizedLinearMethod}, bias=bias, column_shard=column_shard
    )


def read_by_op(linear: Any) -> Any:
    """What the op reads of a layer that `linear_unsupported_reason` accepts: its codes, or the layer itself."""
    return engine_codes.read(linear, _QUANTIZED) or linear


def activation_dtype(linear: Any) -> torch.dtype:
    return linear.weight.dtype if linear.weight.dtype in DTYPES else linear.params_dtype


def rms_norm_unsupported_reason(
    norm: nn.Module, dtype: torch.dtype, *, gemma: bool = False, known: type | None = None
) -> str | None:
    """Why the ops cannot take over a norm, which has to be of class `known`; without one, with `gemma` a GemmaRMSNorm
    (gain 1 + w), else an RMSNorm (gain w)."""
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    if getattr(norm, "cast_x_before_out_mul", False):
        return "its norm rounds before the gain (cast_x_before_out_mul)"
    return norm_unsupported_reason(norm, {known or (GemmaRMSNorm if gemma else RMSNorm)}, dtype)


def determinism_unsupported_reason() -> str | None:
    """SGLang's deterministic mode requires bits that do not depend on the batch."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

    if is_batch_invariant_mode_enabled() and not plan.SETTINGS.batch_invariant:
        return "SGLang's batch-invariant mode is on, and EAGLE_KERNELS_BATCH_INVARIANT is not 1"
    return None
