"""store_context_kv: K and V of context tokens for one draft layer, normed, rotated and written to their cache slots.

    k[i, h]  = rope(k_norm(kv[i, h]), positions[i])              k_cache[slots[i], h] = round(k[i, h])
    v[i, h]  = kv[i, n + h], or kv[i, h] * rstd (k_eq_v)         v_cache[slots[i], h] = round(v[i, h])

What DFlash and DSpark drafters do after the GEMM of K and V. From the norm to the store K stays in fp32 and is rounded
once, as in SGLang 0.5.23 `fused_kv_materialize`; vLLM 0.33 `precompute_and_store_context_kv` also rounds the normed K,
cos and sin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..dispatch import is_plain
from ..library import register, registered_ops
from ..plan import Plan, choose
from .call import run
from .sources import rstd_of

OP = "store_context_kv"
MAX_HEAD_DIM = 1024  # csrc/store_context_kv.h


class StoreContextKV(NamedTuple):
    """The arguments of one call, in the order of the registered op's schema.

    kv: [N, n*d] or [N, 2*n*d], n heads of K and then n of V, if any; the row stride is free. Without V heads, v_cache
        gets the K heads of kv after an RMSNorm without a gain (Gemma 4's k_eq_v).
    k_norm_weight: [norm_width] in kv's dtype or fp32, or None for a unit gain; the gain is norm_offset + weight.
    norm_width: columns [0, norm_width) of a head are normed, by their own mean square; 0 where K has no norm.
    cos_sin: [P, R] in kv's dtype or fp32; a position's row has the cos of R/2 frequencies, then their sin.
    rotary_begin, interleaved: columns [rotary_begin, rotary_begin + R) of a head rotate in pairs: a column of the
        first half and its counterpart in the second (NeoX), or with interleaved two neighbors (GPT-J).
    positions, slots: [N] int32 / int64. A row whose slot is not in the caches (engines pad with -1) or whose position
        is not in cos_sin is skipped.
    k_cache, v_cache: [slots, n, d] in kv's dtype, with any strides by which no two heads share memory; v_cache is None
        where only K is cached (latent attention). The slots of a call's rows must differ (a slot that two rows
        share may end up with parts of both), and the two caches must not overlap; neither is checked.
    """

    kv: Tensor
    k_norm_weight: Tensor | None
    eps: float
    norm_offset: float
    norm_width: int
    cos_sin: Tensor
    rotary_begin: int
    interleaved: bool
    positions: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor | None

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return (self.kv, self.k_norm_weight, self.cos_sin, self.positions, self.slots, self.k_cache, self.v_cache)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (self.k_cache,) if self.v_cache is None else (self.k_cache, self.v_cache)

    @property
    def v_is_k(self) -> bool:
        """Whether the V heads are those of K after a norm without a gain."""
        return self.v_cache is not None and self.kv.shape[1] == self.k_cache.shape[1] * self.k_cache.shape[2]

    def for_primitive(self) -> tuple:
        return self

    def check(self) -> None:
        self.check_arguments()
        names = ("kv", "positions", "slots", "cos_sin", "k_norm_weight")
        inputs = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        for name, cache in (("k_cache", self.k_cache), ("v_cache", self.v_cache)):
            if cache is None:
                continue
            if not _is_disjoint(cache):
                got = f"{name} has shape {tuple(cache.shape)} and strides {cache.stride()}"
                because = "they are written in any order"
                raise checks.error(ValueError, OP, got, "strides by which no two heads share memory", because)
            touched = (other for other, tensor in inputs.items() if _touch(tensor, cache))
            if (other := next(touched, None)) is not None:
                got = f"{name} overlaps {other}"
                raise checks.error(ValueError, OP, got, "disjoint memory", "rows are written while read")

    def check_arguments(self) -> None:
        """Check everything but overlapping memory, which a trace cannot know."""
        kv, k_cache = self.kv, self.k_cache
        checks.check_rows(OP, "kv", kv)
        checks.check_matrix(OP, "kv", kv)
        caches = [("k_cache", k_cache)]
        if self.v_cache is not None:
            caches.append(("v_cache", self.v_cache))
        for name, cache in caches:
            checks.check_operand(OP, name, cache, kv, "kv")
            if cache.dim() != 3 or cache.shape[2] > MAX_HEAD_DIM:
                raise checks.shape_error(OP, name, cache, f"(slots, n, d) with d at most {MAX_HEAD_DIM}")
        _, n, d = k_cache.shape
        if self.v_cache is not None and self.v_cache.shape != k_cache.shape:
            raise checks.shape_error(OP, "v_cache", self.v_cache, str(tuple(k_cache.shape)), "k_cache has that shape")
        widths = (n * d,) if self.v_cache is None else (n * d, 2 * n * d)
        if all(kv.shape[1] != width for width in widths):  # `in` is False of Dynamo's sizes (torch 2.13)
            raise checks.shape_error(OP, "kv", kv, f"(N, {' or '.join(map(str, widths))})", f"a slot has {n} x {d}")
        for name, index in (("positions", self.positions), ("slots", self.slots)):
            checks.check_ids(OP, name, index)
            checks.check_device(OP, name, index, kv.device, "kv")
            checks.check_last_dim_contiguous(OP, name, index)
            if index.shape[0] != kv.shape[0]:
                raise checks.shape_error(OP, name, index, f"({kv.shape[0]},)", "there is one per row of kv")
        checks.check_int(OP, "norm_width", self.norm_width, at_least=0)
        if self.norm_width > d:
            raise checks.error(ValueError, OP, f"norm_width is {self.norm_width}", f"at most d = {d}")
        if self.k_norm_weight is not None:
            checks.check_vector(OP, "k_norm_weight", self.k_norm_weight, self.norm_width, "norm_width", kv, "kv")
        checks.check_eps(OP, "eps", self.eps)
        checks.check_finite(OP, "norm_offset", self.norm_offset)
        self._check_rotary(d)
        checks.check_inference(OP, self.operands)

    def _check_rotary(self, d: int) -> None:
        checks.check_operand(OP, "cos_sin", self.cos_sin, self.kv, "kv", fp32_too=True)
        checks.check_int(OP, "rotary_begin", self.rotary_begin, at_least=0)
        if self.cos_sin.dim() != 2 or self.cos_sin.shape[1] % 2:
            raise checks.shape_error(OP, "cos_sin", self.cos_sin, "(P, R) with an even R")
        if self.rotary_begin + self.cos_sin.shape[1] > d:
            because = f"rotary_begin is {self.rotary_begin}"
            raise checks.shape_error(
                OP, "cos_sin", self.cos_sin, f"(P, R) with R at most {d - self.rotary_begin}", because
            )

    @torch.no_grad()
    def reference(self) -> None:
        """In fp32."""
        inside = (self.slots >= 0) & (self.slots < self.k_cache.shape[0])
        inside &= (self.positions >= 0) & (self.positions < self.cos_sin.shape[0])
        rows = inside.nonzero().squeeze(1)
        k, v = self.values(rows)
        slot = self.slots[rows].long()
        self.k_cache[slot] = k.to(self.k_cache.dtype)
        if self.v_cache is not None:
            self.v_cache[slot] = v.to(self.v_cache.dtype)

    def values(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """K and V [rows, n, d] of these rows of kv, computed in `dtype` and not rounded."""
        _, n, d = self.k_cache.shape
        heads = self.kv[rows].to(dtype).unflatten(1, (-1, d))
        k, v = heads[:, :n], heads[:, n:]
        if self.v_is_k:
            v = k * rstd_of(k.square().mean(-1, keepdim=True), self.eps)
        if self.norm_width:
            normed, others = k.split((self.norm_width, d - self.norm_width), -1)
            normed = normed * rstd_of(normed.square().mean(-1, keepdim=True), self.eps)
            if self.k_norm_weight is not None:
                normed = normed * (self.norm_offset + self.k_norm_weight.to(dtype))
            k = torch.cat((normed, others), -1)
        width, begin = self.cos_sin.shape[1], self.rotary_begin
        before, turned, after = k.split((begin, width, d - begin - width), -1)
        cos, sin = self.cos_sin[self.positions[rows].long()].to(dtype).unsqueeze(1).chunk(2, -1)
        pairs = turned.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else turned.chunk(2, -1)
        pair = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
        turned = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return torch.cat((before, turned, after), -1), v


def store_context_kv(record: StoreContextKV) -> None:
    """Write the rows of one draft layer. Raises TypeError / ValueError for what does not fit, before writing any."""
    if is_plain(*record.operands):
        _run_record(record)
    else:
        record.check_arguments()
        registered_ops.store_context_kv(*record)


def plan(device: torch.device) -> Plan:
    return choose(OP, device)


def _run_record(record: StoreContextKV) -> None:
    run(record, plan(record.kv.device), record.outputs)


def _is_disjoint(cache: Tensor) -> bool:
    """Whether every element has a place of its own. The stride of a dimension of one entry is not used."""
    if cache.numel() == 0:
        return True
    end = cache.shape[2]
    for size, stride in sorted(zip(cache.shape[:2], cache.stride()[:2], strict=True), key=lambda each: each[1]):
        if size == 1:
            continue
        if stride < end:
            return False
        end += (size - 1) * stride
    return True


def _touch(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges of a and b overlap, gaps included: neither a cache nor an input lies in another's."""
    (a_begin, a_end), (b_begin, b_end) = checks.byte_range(a), checks.byte_range(b)
    return a_begin < b_end and b_begin < a_end


register(
    "store_context_kv(Tensor kv, Tensor? k_norm_weight, float eps, float norm_offset, int norm_width, Tensor cos_sin, "
    "int rotary_begin, bool interleaved, Tensor positions, Tensor slots, Tensor(a!) k_cache, Tensor(b!)? v_cache"
    ") -> ()",
    lambda *arguments: _run_record(StoreContextKV(*arguments)),
    lambda *arguments: None,
)
