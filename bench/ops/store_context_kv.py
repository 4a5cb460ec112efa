"""store_context_kv against the norm, rotation and cache write of each row, in plain torch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_kernels.model_shapes import ContextCache, InputStage
from eagle_kernels.ops.store_context_kv import StoreContextKV, plan, store_context_kv
from eagle_kernels.plan import Plan

from ..baselines import NormScratch
from ..measure import Call, Footprint, Traffic
from ..workloads import Row, Workload

_POSITIONS = 32768
_BASE = 1e6  # of the frequencies


def stored(record: StoreContextKV) -> tuple[Tensor, ...]:
    """With the roundings of vLLM's `precompute_and_store_context_kv`: from the norm on in the dtype of K."""
    n, d = record.k_cache.shape[1:]
    heads = record.kv.unflatten(1, (-1, d))
    k = F.rms_norm(heads[:, :n], (d,), record.k_norm_weight, record.eps)
    begin = record.rotary_begin
    cos, sin = record.cos_sin[record.positions].unsqueeze(1).chunk(2, -1)
    turned = k[..., begin:]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if record.interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(pair, -1).flatten(-2) if record.interleaved else torch.cat(pair, -1)
    record.k_cache[record.slots] = torch.cat((k[..., :begin], turned), -1) if begin else turned
    if record.v_cache is not None:
        record.v_cache[record.slots] = heads[:, n:]
    return record.outputs


class PreallocatedStore:
    """The same in static memory, with the roundings of SGLang's `fused_kv_materialize`: K is fp32 until stored."""

    def __init__(self, T: int, context: ContextCache, rotary_dim: int, dtype: torch.dtype, device: str) -> None:
        n, d = context.num_kv_heads, context.head_dim
        self._norm = NormScratch(T, n, d, device=device)
        self._k, self._turned = (torch.zeros(T, n, d, device=device) for _ in range(2))
        self._cos_sin = torch.zeros(T, rotary_dim, dtype=dtype, device=device)
        self._product = torch.zeros(T, n, rotary_dim // 2, device=device)
        self._rounded = torch.zeros(T, n, d, dtype=dtype, device=device)

    @staticmethod
    def num_bytes(T: int, context: ContextCache) -> int:
        columns = context.num_kv_heads * context.head_dim
        return NormScratch.num_bytes(T * context.num_kv_heads, context.head_dim) + 16 * T * columns

    def store(self, record: StoreContextKV, gain: Tensor) -> tuple[Tensor, ...]:
        n, d = record.k_cache.shape[1:]
        heads, begin = record.kv.unflatten(1, (-1, d)), record.rotary_begin
        self._norm.norm(heads[:, :n], gain, record.eps, self._k)
        cos_sin = torch.index_select(record.cos_sin, 0, record.positions, out=self._cos_sin)
        cos, sin = cos_sin.unsqueeze(1).chunk(2, -1)
        (first, second), turned = (self._halves(of[..., begin:], record.interleaved) for of in (self._k, self._turned))
        torch.mul(first, cos, out=turned[0]).sub_(torch.mul(second, sin, out=self._product))
        torch.mul(second, cos, out=turned[1]).add_(torch.mul(first, sin, out=self._product))
        self._rounded[..., :begin].copy_(self._k[..., :begin])
        self._rounded[..., begin:].copy_(self._turned[..., begin:])
        record.k_cache.index_copy_(0, record.slots, self._rounded)
        if record.v_cache is not None:
            record.v_cache.index_copy_(0, record.slots, heads[:, n:])
        return record.outputs

    @staticmethod
    def _halves(columns: Tensor, interleaved: bool) -> Sequence[Tensor]:
        return (columns[..., 0::2], columns[..., 1::2]) if interleaved else columns.chunk(2, -1)


class StoreContext(Workload):
    """One draft layer. Every copy has its own rows of K and V, a slice of one product's result for all layers, and its
    own caches of T slots, all of them written; positions and frequencies, which the copies share, are in no figure."""

    sizes = ("n", "d")
    baselines = ("eager", "eager-out", "compile")
    chain = staticmethod(stored)

    def __init__(self, row: Row, cache_bytes: int = 0) -> None:
        super().__init__(row, cache_bytes)
        if row.stage.context is None:
            raise AssertionError(self.no_stage_reason(row.stage))
        self.context: ContextCache = row.stage.context
        self.exact = (False,) if self.context.values == "none" else (False, True)
        self.rotary_dim = self.context.head_dim - self.context.rotary_begin

    @staticmethod
    def no_stage_reason(stage: InputStage) -> str | None:
        return "no cache of draft layers is part of it" if stage.context is None else None

    def footprint(self, names: Sequence[str]) -> Footprint:
        touched = self.traffic().total
        of_other_layers = self.row.T * (self.row.stage.D - self.context.kv_width) * self.item
        scratch = PreallocatedStore.num_bytes(self.row.T, self.context) if "eager-out" in names else 0
        return Footprint(touched, touched + of_other_layers, _POSITIONS * self.rotary_dim * self.item + scratch)

    def traffic(self) -> Traffic:
        values = self.row.T * self.context.kv_width * self.item
        return Traffic(values, values)

    def allocate(self, copies: int) -> None:
        row, context, device = self.row, self.context, self.row.device
        kv = self.random(copies, row.T, row.stage.D)
        caches = [self.poisoned(copies, row.T, context.num_kv_heads, context.head_dim) for _ in self.exact]
        gain = self.random_gain(context.head_dim)
        frequencies = _BASE ** -torch.linspace(0, 1, self.rotary_dim // 2 + 1, device=device)[:-1]
        angles = torch.arange(_POSITIONS, device=device).unsqueeze(1) * frequencies
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(row.dtype)
        positions = torch.randint(_POSITIONS, (row.T,), device=device)
        slots = torch.randperm(row.T, device=device)
        self.rows_of_slots = slots.argsort()
        self.chain_arguments = []
        for copy in range(copies):
            k_cache, v_cache = caches[0][copy], caches[1][copy] if len(caches) > 1 else None
            layer = (gain, row.stage.eps, 0.0, context.head_dim, cos_sin, context.rotary_begin, context.interleaved)
            of_layer = kv[copy, :, : context.kv_width]
            self.chain_arguments.append((StoreContextKV(of_layer, *layer, positions, slots, k_cache, v_cache),))

    def plan(self) -> Plan:
        return plan(torch.device(self.row.device))

    def _call(self, name: str) -> tuple[Call, int]:
        if name != "op":
            return super()._call(name)
        records = [record for (record,) in self.chain_arguments]

        def call(copy: int) -> tuple[Tensor, ...]:
            store_context_kv(records[copy])
            return records[copy].outputs

        return call, len(records)

    def _preallocated(self) -> Call:
        records = [record for (record,) in self.chain_arguments]
        wide = records[0].k_norm_weight.float()
        static = PreallocatedStore(self.row.T, self.context, self.rotary_dim, self.row.dtype, self.row.device)
        return lambda copy: static.store(records[copy], wide)

    def truth(self, copy: int, rows: Tensor) -> list[Tensor]:
        """`rows` are slots."""
        (record,) = self.chain_arguments[copy]
        k, v = record.values(self.rows_of_slots[rows], torch.float64)
        return [k, v.to(record.kv.dtype)][: len(self.exact)]


WORKLOAD = StoreContext
