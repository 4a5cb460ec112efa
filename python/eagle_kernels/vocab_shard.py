"""Which rows of a vocabulary table one tensor-parallel rank has, and where: the layout both engines pad to.

Source: `VocabParallelEmbedding` of SGLang 0.5.23 and vLLM 0.33, which agree row for row; vLLM raises where P (see
`VocabShard.build`) widens. Slicing the table by ceil(V / tp), as SGLang's Gemma models do for a drafter, gives this
layout iff pad(V, P) - V < tp.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import checks


@dataclass(frozen=True)
class VocabShard:
    """The rows of rank `tp_rank` of `tp_size`: a hashable record of plain ints. Make one with `VocabShard.build`.

    local row of id v = v - org_begin                    if org_begin <= v < org_end
                        v - added_begin + added_row      if added_begin <= v < added_end
                        none, so the id's row is zero    otherwise

    `rows` counts the local rows, padding included; `padding` is P in the formula of `build`.
    """

    num_embeddings: int
    org_num_embeddings: int
    tp_rank: int
    tp_size: int
    padding: int
    rows: int
    org_begin: int
    org_end: int
    added_begin: int
    added_end: int
    added_row: int
    # Computed from the fields above, as every lookup reads them: what kernels need to know of the shard, and the number
    # of local rows up to the last one that an id maps to.
    bounds: tuple[int, int, int, int, int] = field(init=False, repr=False, compare=False)
    used_rows: int = field(init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        num_embeddings: int,
        *,
        tp_rank: int,
        tp_size: int,
        org_num_embeddings: int | None = None,
        padding_size: int = 64,
    ) -> "VocabShard":
        """The rows of rank r, with pad(v, p) = ceil(v / p) * p and added = V - org, ids appended to the original ones:

            P     = padding_size if pad(org, padding_size) % tp == 0 else padding_size * tp
            orgp  = pad(org, P),  total = pad(orgp + added, P),  rows = total / tp
            o     = orgp / tp,  a = (total - orgp) / tp

            [0, o)     original ids [r*o, (r+1)*o) clamped to org, then zero rows
            [o, rows)  added ids [org + r*a, org + (r+1)*a) clamped to V, then zero rows

        Args:
            num_embeddings: V, original and added ids together.
            tp_rank, tp_size: of the group that shares the embedding; for a drafter that is the drafter's own group.
            org_num_embeddings: ids of the original vocabulary; None or 0 means all of V, as in the engines.
            padding_size: 64 in both engines (`DEFAULT_VOCAB_PADDING_SIZE`).

        Raises:
            TypeError: an argument is not an int.
            ValueError: a count below 1, a rank outside the group, more original ids than ids, or a padded table that
                does not divide over the ranks (added ids on an odd tp_size; both engines assert there).
        """
        op = "VocabShard.build"
        num_embeddings = checks.check_int(op, "num_embeddings", num_embeddings, at_least=1)
        tp_size = checks.check_int(op, "tp_size", tp_size, at_least=1)
        tp_rank = checks.check_int(op, "tp_rank", tp_rank, at_least=0)
        padding_size = checks.check_int(op, "padding_size", padding_size, at_least=1)
        org = num_embeddings
        if org_num_embeddings is not None:
            org = checks.check_int(op, "org_num_embeddings", org_num_embeddings, at_least=0) or num_embeddings
        if tp_rank >= tp_size:
            raise checks.error(ValueError, op, f"tp_rank is {tp_rank}", f"below tp_size = {tp_size}")
        if org > num_embeddings:
            raise checks.error(
                ValueError, op, f"org_num_embeddings is {org}", f"at most num_embeddings = {num_embeddings}"
            )

        padding = padding_size if _pad(org, padding_size) % tp_size == 0 else padding_size * tp_size
        org_padded = _pad(org, padding)
        total = _pad(org_padded + num_embeddings - org, padding)
        if total % tp_size:
            raise checks.error(
                ValueError,
                op,
                f"padding_size is {padding_size}",
                f"{padding_size * tp_size}",
                f"the {total} padded rows do not divide over tp_size = {tp_size}",
            )
        org_rows = org_padded // tp_size
        added_rows = (total - org_padded) // tp_size
        return cls(
            num_embeddings=num_embeddings,
            org_num_embeddings=org,
            tp_rank=tp_rank,
            tp_size=tp_size,
            padding=padding,
            rows=total // tp_size,
            org_begin=min(tp_rank * org_rows, org),
            org_end=min((tp_rank + 1) * org_rows, org),
            # Added ids count from org, not from org_padded: padding rows have no ids.
            added_begin=min(org + tp_rank * added_rows, num_embeddings),
            added_end=min(org + (tp_rank + 1) * added_rows, num_embeddings),
            added_row=org_rows,
        )

    def __post_init__(self) -> None:
        added = self.added_end - self.added_begin
        bounds = (self.org_begin, self.org_end, self.added_begin, self.added_end, self.added_row)
        object.__setattr__(self, "bounds", bounds)
        used_rows = self.added_row + added if added > 0 else max(self.org_end - self.org_begin, 0)
        object.__setattr__(self, "used_rows", used_rows)

    @property
    def is_full_table(self) -> bool:
        """Whether the local row of every id v is v: a single rank, and no padding between original and added ids."""
        has_gap = self.added_begin < self.added_end and self.added_begin != self.added_row
        return self.tp_size == 1 and not has_gap

    def local_rows(self, ids: Tensor) -> Tensor:
        """The local row of each id, -1 where it is not in this shard: int64, the shape of `ids`.

        ids: any integer dtype. TypeError otherwise. The reference of `vocab_parallel_embedding`.
        """
        op = "VocabShard.local_rows"
        checks.check_tensor(op, "ids", ids)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise checks.error(TypeError, op, f"ids has dtype {ids.dtype}", "an integer dtype")
        # int8 and int16 ids would wrap in the subtractions below.
        ids = ids.long()
        in_org = (ids >= self.org_begin) & (ids < self.org_end)
        in_added = (ids >= self.added_begin) & (ids < self.added_end)
        rows = torch.where(in_org, ids - self.org_begin, -1)
        return torch.where(in_added, ids - self.added_begin + self.added_row, rows)


def shard_vocab_weight(full_weight: Tensor, shard: VocabShard) -> Tensor:
    """weight[shard.local_rows(v)] = full_weight[v] for every id v of the shard; every other row is zero.

    Args:
        full_weight: [shard.num_embeddings, H], any dtype: original rows first, added row i at
            shard.org_num_embeddings + i.
        shard: the layout of the rank, the drafter's where a drafter reads the weight.

    Returns:
        [shard.rows, H], detached: a view of `full_weight` where the shard is one run of its rows without padding
        (without added ids: V a multiple of 64 and of tp_size), else a zero-padded copy.

    Raises:
        TypeError: `full_weight` is not a tensor or `shard` is not a VocabShard.
        ValueError: `full_weight` is not 2-D or has another number of rows.
    """
    op = "shard_vocab_weight"
    checks.check_tensor(op, "full_weight", full_weight)
    checks.check_type(op, "shard", shard, VocabShard, "a VocabShard")
    if full_weight.dim() != 2 or full_weight.shape[0] != shard.num_embeddings:
        raise checks.shape_error(
            op, "full_weight", full_weight, f"({shard.num_embeddings}, H)", f"the shard has {shard.num_embeddings} ids"
        )
    full_weight = full_weight.detach()
    org = full_weight[shard.org_begin : shard.org_end]
    added = full_weight[shard.added_begin : shard.added_end]
    one_run = len(added) == 0 or shard.org_end == shard.added_begin
    if one_run and len(org) + len(added) == shard.rows:
        return full_weight[shard.org_begin : shard.org_begin + shard.rows]
    weight = full_weight.new_zeros(shard.rows, full_weight.shape[1])
    weight[: len(org)] = org
    weight[shard.added_row : shard.added_row + len(added)] = added
    return weight


def _pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
