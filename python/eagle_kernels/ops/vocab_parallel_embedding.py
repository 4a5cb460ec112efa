"""vocab_parallel_embedding: the rows of one vocab shard, zero rows for ids that other ranks hold.

    out[i] = weight[local(ids[i])] * scale     where the shard holds ids[i]
    out[i] = 0                                 elsewhere: the sum over ranks (the all-reduce) is the full lookup

Replaces mask + clamp + gather + masked_fill (+ scale + copy) of `VocabParallelEmbedding` in SGLang 0.5.23 and vLLM
0.33, with their layout (`vocab_shard.py`). Shard bounds are runtime values: all ranks share one kernel.
"""

import torch
from torch import Tensor

from .. import checks
from ..direct import is_direct
from ..library import register
from ..plan import COMPILED, Plan, simple_plan
from ..vocab_shard import VocabShard

OP = "vocab_parallel_embedding"


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    shard: VocabShard,
    *,
    scale: float | Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = weight[local(ids[i])] (* scale) for the ids this shard holds, a zero row for all others.

    Args:
        ids: int32 / int64, any shape. Negative, too large or foreign ids give zero rows, at tp_size 1 as well, and no
            memory outside the table is touched.
        weight: [shard.rows, H], bf16, fp16 or fp32 (see `shard_vocab_weight`); the zero padding at its end may be
            missing, so an unpadded full table serves as the one shard of tp_size 1. Row stride free.
        shard: `VocabShard.build(...)`.
        scale: multiplies the row in fp32 before the one rounding. A Python float is used as it is: SGLang's Gemma
            (`embeds * hidden_size**0.5`). A 0-d tensor is used with its own rounding: Hugging Face and vLLM multiply by
            the bf16-rounded scale.
        out: [*ids.shape, H], last stride 1; allocated where None. May be a slice of a static buffer.

    Returns:
        [*ids.shape, H] in weight's dtype; without scale the bits of the table's rows.

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing is written.
        RuntimeError: an input requires grad while grad mode is on.
    """
    try:
        if out is not None and weight.shape[0] <= shard.rows and is_direct(OP, out, weight):
            scales = (None, scale) if isinstance(scale, Tensor) else (scale, None)
            torch.ops.eagle_kernels_C.vocab_parallel_embedding_out(ids, weight, *_bounds(shard), *scales, out)
            return out
    except Exception:  # whatever it is: the checks below word it, or the registered op raises it again
        pass
    checks.check_tensor(OP, "ids", ids)
    checks.check_dtype(OP, "ids", ids, (torch.int32, torch.int64))
    checks.check_tensor(OP, "weight", weight)
    checks.check_dtype(OP, "weight", weight, checks.DTYPES)
    checks.check_device(OP, "weight", weight, ids.device, "ids")
    checks.check_last_dim_contiguous(OP, "weight", weight)
    if not isinstance(shard, VocabShard):
        raise checks.error(TypeError, OP, f"shard is a {type(shard).__name__}", "a VocabShard")
    held = _held_rows(shard)
    if weight.dim() != 2 or not held <= weight.shape[0] <= shard.rows:
        raise checks.shape_error(
            OP,
            "weight",
            weight,
            f"(rows, H) = ({shard.rows}, *)",
            f"rank {shard.tp_rank} of {shard.tp_size} holds {held} ids' rows",
        )
    scale_value, scale_tensor = _split_scale(scale, weight)
    checks.check_inference(OP, (weight, out))

    flat_ids = ids.reshape(-1)
    arguments = (flat_ids, weight, *_bounds(shard), scale_value, scale_tensor)
    if out is None:
        rows = torch.ops.eagle_kernels.vocab_parallel_embedding(*arguments)
        return rows if ids.dim() == 1 else rows.view(*ids.shape, weight.shape[1])
    torch.ops.eagle_kernels.vocab_parallel_embedding_out(*arguments, _out_rows(ids, weight, out))
    return out


def _bounds(shard: VocabShard) -> tuple[int, int, int, int, int]:
    return shard.org_begin, shard.org_end, shard.added_begin, shard.added_end, shard.added_row


def _held_rows(shard: VocabShard) -> int:
    """Rows of the local table up to the last one that an id maps to."""
    added = shard.added_end - shard.added_begin
    return shard.added_row + added if added > 0 else max(shard.org_end - shard.org_begin, 0)


def _split_scale(scale: float | Tensor | None, weight: Tensor) -> tuple[float | None, Tensor | None]:
    if not isinstance(scale, Tensor):
        return (None if scale is None else checks.check_number(OP, "scale", scale, "a number or a 0-d tensor")), None
    checks.check_dtype(OP, "scale", scale, checks.DTYPES)
    if scale.dim() != 0:
        raise checks.shape_error(OP, "scale", scale, "a 0-d tensor or a float")
    checks.check_device(OP, "scale", scale, weight.device, "weight")
    return None, scale


def _out_rows(ids: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    checks.check_operand(OP, "out", out, weight, "weight")
    expected = (*ids.shape, weight.shape[1])
    if tuple(out.shape) != expected:
        raise checks.shape_error(OP, "out", out, f"(*ids.shape, H) = {expected}")
    if ids.dim() == 1:
        return out
    try:
        return out.view(-1, weight.shape[1])
    except RuntimeError:
        raise checks.error(
            ValueError,
            OP,
            f"out has strides {out.stride()}",
            "rows of one common stride",
            f"ids has {ids.dim()} dimensions",
        ) from None


def plan(ids: Tensor, *_args: object, **_kwargs: object) -> Plan:
    return simple_plan(OP, ids.device)


def _run(
    ids: Tensor,
    weight: Tensor,
    org_begin: int,
    org_end: int,
    added_begin: int,
    added_end: int,
    added_row: int,
    scale: float | None,
    scale_tensor: Tensor | None,
    out: Tensor,
) -> None:
    checks.check_no_overlap(OP, "out", out, (("weight", weight), ("ids", ids)))
    bounds = (org_begin, org_end, added_begin, added_end, added_row)
    backend = simple_plan(OP, ids.device).backend
    if backend in COMPILED:
        torch.ops.eagle_kernels_C.vocab_parallel_embedding_out(ids, weight, *bounds, scale, scale_tensor, out)
    elif backend == "triton":
        from ..triton_kernels.vocab_parallel_embedding import vocab_parallel_embedding as kernel

        kernel(ids, weight, *bounds, scale, scale_tensor, out)
    else:
        reference(ids, weight, *bounds, scale, scale_tensor, out)


@torch.no_grad()
def reference(
    ids: Tensor,
    weight: Tensor,
    org_begin: int,
    org_end: int,
    added_begin: int,
    added_end: int,
    added_row: int,
    scale: float | None,
    scale_tensor: Tensor | None,
    out: Tensor,
) -> None:
    """Plain torch, any device: the mask + gather + fill chain that engines run."""
    ids = ids.long()
    is_org = (ids >= org_begin) & (ids < org_end)
    is_added = (ids >= added_begin) & (ids < added_end)
    local = torch.where(is_org, ids - org_begin, torch.where(is_added, ids - added_begin + added_row, 0))
    held = (is_org | is_added).unsqueeze(-1)
    if weight.shape[0] == 0:
        out.zero_()
        return
    rows = weight[local]
    factor = scale if scale_tensor is None else scale_tensor.float()
    if factor is not None:
        rows = (rows.float() * factor).to(weight.dtype)
    out.copy_(torch.where(held, rows, 0))


def _functional(ids: Tensor, weight: Tensor, *arguments: object) -> Tensor:
    out = weight.new_empty(ids.shape[0], weight.shape[1])
    _run(ids, weight, *arguments, out)
    return out


_ARGUMENTS = (
    "Tensor ids, Tensor weight, SymInt org_begin, SymInt org_end, SymInt added_begin, SymInt added_end, "
    "SymInt added_row, float? scale, Tensor? scale_tensor"
)
register(
    f"vocab_parallel_embedding({_ARGUMENTS}) -> Tensor",
    _functional,
    lambda ids, weight, *args: weight.new_empty(ids.shape[0], weight.shape[1]),
)
register(f"vocab_parallel_embedding_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _run, lambda *args: None)
