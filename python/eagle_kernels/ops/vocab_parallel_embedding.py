"""vocab_parallel_embedding: the rows of one vocab shard, zero rows for ids that other ranks hold.

    out[i] = weight[local(ids[i])] * scale     where ids[i] is in the shard
    out[i] = 0                                 elsewhere: the sum over ranks (the all-reduce) is the full lookup

Replaces mask + clamp + gather + masked_fill (+ scale + copy) of `VocabParallelEmbedding` in SGLang 0.5.23 and vLLM
0.33, with their layout (`vocab_shard.py`). Shard bounds are runtime values: all ranks share one kernel.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import is_plain
from ..library import register_with_out, registered_ops
from ..plan import Plan, choose
from ..vocab_shard import VocabShard
from .call import run

OP = "vocab_parallel_embedding"


def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    shard: VocabShard,
    *,
    scale: float | Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[i] = weight[local(ids[i])] (* scale) for the ids in this shard, a zero row for all others.

    Args:
        ids: int32 / int64, any shape. Ids that are negative, too large or another rank's give zero rows, at tp_size 1
            as well, and no memory outside the table is touched.
        weight: [shard.rows, H], bf16, fp16 or fp32 (see `shard_vocab_weight`); the zero padding at its end may be
            missing, so an unpadded full table serves as the one shard of tp_size 1. Row stride free.
        shard: `VocabShard.build(...)`.
        scale: multiplies the row in fp32 before the one rounding. A Python float is used unrounded, as in SGLang's
            Gemma (`embeds * hidden_size**0.5`). A 0-d tensor is used as rounded to its dtype: Hugging Face and vLLM
            multiply by the bf16-rounded scale.
        out: [*ids.shape, H], last stride 1; allocated where None. May be a slice of a static buffer.

    Returns:
        [*ids.shape, H] in weight's dtype; without scale bit-identical to the table's rows.

    Raises:
        TypeError, ValueError: an argument that does not fit; nothing is written.
        RuntimeError: an input requires grad while grad mode is on, or has a tangent of forward-mode differentiation.
    """
    scale_tensor = scale if isinstance(scale, Tensor) else None
    if scale_tensor is not None:
        scale = None
    elif scale is not None and type(scale) is not float:
        scale = checks.check_number(OP, "scale", scale, "a number or a 0-d tensor")
    if is_plain(ids, weight, scale_tensor, out) and ids.dim() == 1 and _fits(weight, shard):
        out = weight.new_empty(ids.shape[0], weight.shape[1]) if out is None else out
        record = VocabParallelEmbedding(ids, weight, *shard.bounds, scale, scale_tensor, out)
        run(record, choose(OP, ids.device), (out,))
        return out
    checks.check_tensor(OP, "ids", ids)
    check_table(OP, weight, shard)
    # `check_arguments` ignores `out`, which may be shaped like ids of several dimensions, or None.
    record = VocabParallelEmbedding(ids.reshape(-1), weight, *shard.bounds, scale, scale_tensor, out)  # type: ignore[arg-type]
    record.check_arguments()
    if out is None:
        rows = registered_ops.vocab_parallel_embedding(*record[:-1])
        return rows if ids.dim() == 1 else rows.view(*ids.shape, weight.shape[1])
    rows = _out_rows(ids, weight, out)
    if not ids.is_contiguous() and is_plain(rows, ids):  # the record has a copy of them
        _check_strided_ids(ids, rows)
    registered_ops.vocab_parallel_embedding_out(*record[:-1], rows)
    return out


def _fits(weight: object, shard: object) -> bool:
    """Whether the table fits the shard. No kernel can tell: kernels get only the shard's bounds."""
    return (
        isinstance(weight, Tensor)
        and not weight.is_nested
        and weight.dim() == 2
        and isinstance(shard, VocabShard)
        and shard.used_rows <= weight.shape[0] <= shard.rows
    )


def check_table(op: str, weight: Tensor, shard: VocabShard) -> None:
    """Raise where the weight is not the shard's rows; the zero padding at their end may be missing."""
    checks.check_tensor(op, "weight", weight)
    checks.check_type(op, "shard", shard, VocabShard, "a VocabShard")
    used = shard.used_rows
    if weight.dim() != 2 or not used <= weight.shape[0] <= shard.rows:
        because = f"rank {shard.tp_rank} of {shard.tp_size} holds {used} ids' rows"
        raise checks.shape_error(op, "weight", weight, f"(rows, H) = ({shard.rows}, *)", because)


def check_scale(op: str, scale: Tensor) -> None:
    checks.check_tensor(op, "scale", scale)
    checks.check_dtype(op, "scale", scale, checks.DTYPES)
    if scale.dim() != 0:
        raise checks.shape_error(op, "scale", scale, "a 0-d tensor or a float")


def _out_rows(ids: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    checks.check_operand(OP, "out", out, weight, "weight")
    checks.check_inference(OP, (out,))
    expected = (*ids.shape, weight.shape[1])
    if tuple(out.shape) != expected:
        raise checks.shape_error(OP, "out", out, f"(*ids.shape, H) = {expected}")
    if ids.dim() == 1:
        return out
    try:
        return out.view(ids.numel(), weight.shape[1])
    except RuntimeError:
        raise checks.error(
            ValueError,
            OP,
            f"out has strides {out.stride()}",
            "rows of one common stride",
            f"ids has {ids.dim()} dimensions",
        ) from None


def _check_strided_ids(ids: Tensor, out: Tensor) -> None:
    """Raise where `out` shares memory with ids of several dimensions that are not dense."""
    (ids_begin, ids_end), (out_begin, out_end) = checks.byte_range(ids), checks.byte_range(out)
    if ids_begin < out_end and out_begin < ids_end:
        places = itertools.product(*map(range, ids.shape[:-1]))
        checks.check_no_overlap(OP, "out", out, (("ids", ids[place]) for place in places))


class VocabParallelEmbedding(NamedTuple):
    """The arguments of one call, with ids as a 1-D tensor and the shard as its bounds."""

    ids: Tensor
    weight: Tensor
    org_begin: int
    org_end: int
    added_begin: int
    added_end: int
    added_row: int
    scale: float | None
    scale_tensor: Tensor | None
    out: Tensor

    def for_primitive(self) -> tuple:
        return self

    def check(self) -> None:
        self.check_arguments()
        _out_rows(self.ids, self.weight, self.out)
        reads = (("weight", self.weight), ("ids", self.ids), ("scale", self.scale_tensor))
        checks.check_no_overlap(OP, "out", self.out, reads)

    def check_arguments(self) -> None:
        """Check everything but `out`, which the caller may have shaped like ids of several dimensions."""
        ids, weight, scale_tensor = self.ids, self.weight, self.scale_tensor
        checks.check_tensor(OP, "ids", ids)
        checks.check_dtype(OP, "ids", ids, (torch.int32, torch.int64))
        checks.check_tensor(OP, "weight", weight)
        checks.check_dtype(OP, "weight", weight, checks.DTYPES)
        checks.check_device(OP, "weight", weight, ids.device, "ids")
        checks.check_last_dim_contiguous(OP, "weight", weight)
        self._check_bounds()
        if scale_tensor is not None:
            check_scale(OP, scale_tensor)
            checks.check_device(OP, "scale", scale_tensor, weight.device, "weight")
        checks.check_inference(OP, (weight, scale_tensor))

    def _check_bounds(self) -> None:
        """A VocabShard's bounds are right by construction; a caller of the registered op may pass others."""
        _, weight, org_begin, org_end, added_begin, added_end, added_row, *_ = self
        if not (0 <= org_begin <= org_end and 0 <= added_begin <= added_end):
            got = f"the bounds are [{org_begin}, {org_end}) and [{added_begin}, {added_end})"
            raise checks.error(ValueError, OP, got, "ascending bounds from 0 on")
        added = added_end - added_begin
        if org_end - org_begin > weight.shape[0] or (added and not 0 <= added_row <= weight.shape[0] - added):
            rows = max(org_end - org_begin, added_row + added if added else 0)
            raise checks.shape_error(OP, "weight", weight, f"at least {rows} rows", "the shard's bounds reach that far")

    @torch.no_grad()
    def reference(self) -> None:
        """The mask + gather + fill chain that engines run."""
        ids, weight, org_begin, org_end, added_begin, added_end, added_row, scale, scale_tensor, out = self
        if weight.shape[0] == 0:
            out.zero_()
            return
        ids = ids.long()
        is_org = (ids >= org_begin) & (ids < org_end)
        is_added = (ids >= added_begin) & (ids < added_end)
        local = torch.where(is_org, ids - org_begin, torch.where(is_added, ids - added_begin + added_row, 0))
        rows = weight[local]
        factor = scale if scale_tensor is None else scale_tensor.float()
        if factor is not None:
            rows = (rows.float() * factor).to(weight.dtype)
        out.copy_(torch.where((is_org | is_added).unsqueeze(-1), rows, 0))


def plan(ids: Tensor, *_args: object, **_kwargs: object) -> Plan:
    """The plan of a call with these arguments; see `eagle_kernels.explain`."""
    checks.check_tensor(OP, "ids", ids)
    return choose(OP, ids.device)


def _run_out(ids: Tensor, weight: Tensor, *others: Any) -> None:
    _check_ranks(ids, weight)
    run(VocabParallelEmbedding(ids, weight, *others), choose(OP, ids.device), others[-1:])


def _check_ranks(ids: Tensor, weight: Tensor) -> None:
    """A caller of the registered op may pass others."""
    checks.check_ids(OP, "ids", ids)
    if weight.dim() != 2:
        raise checks.shape_error(OP, "weight", weight, "(rows, H)")


def _empty(ids: Tensor, weight: Tensor, *_others: object) -> Tensor:
    _check_ranks(ids, weight)
    return weight.new_empty(ids.shape[0], weight.shape[1])


_ARGUMENTS = (
    "Tensor ids, Tensor weight, SymInt org_begin, SymInt org_end, SymInt added_begin, SymInt added_end, "
    "SymInt added_row, float? scale, Tensor? scale_tensor"
)
register_with_out("vocab_parallel_embedding", _ARGUMENTS, _run_out, _empty)
