"""store_context_kv: every form of K against float64, both engines' rounding orders, and what memory it touches."""

import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from eagle_kernels.bench.accuracy import UNIT_ROUNDOFF
from torch import Tensor

from accuracy import FP32, relative_rms
from backends import environment_of, needs_compiled
from bad_calls import BAD_CALLS, CONTEXT_KV, BadCall
from eagle_kernels.ops.store_context_kv import StoreContextKV, store_context_kv
from guards import UnchangedTensors, between_forbidden_pages, same_bits
from primitives import tensors_of

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_IDS = ["bf16", "fp16", "fp32"]
POSITIONS, SLOTS = 40, 50


@dataclass(frozen=True)
class Form:
    """n heads of d columns, the first `norm_width` normed, R of them from `rotary_begin` on rotated."""

    n: int
    d: int
    R: int
    norm_width: int
    v: str = "own"  # or none; or k: the columns of K after a norm without gain
    gain: str = "dtype"  # or fp32, none
    norm_offset: float = 0.0
    rotary_begin: int = 0
    interleaved: bool = False
    eps: float = 1e-6


FORMS = {
    "qwen3": Form(2, 128, 128, 128),
    "odd-widths": Form(3, 33, 22, 33, eps=0.3),
    "partial": Form(1, 80, 24, 80, gain="fp32"),
    "minimax_m3": Form(2, 64, 32, 64, norm_offset=1.0),
    "muse": Form(2, 64, 64, 64, gain="none"),
    "no-norm": Form(2, 40, 40, 0, gain="none"),
    "interleaved": Form(2, 48, 30, 48, interleaved=True, rotary_begin=18),
    "gemma4": Form(2, 64, 64, 64, v="k"),
    "kimi_k3": Form(1, 72, 8, 64, v="none", rotary_begin=64),
    "no-rotary": Form(2, 16, 0, 16),
    "one-pair": Form(1, 2, 2, 2),
    "widest": Form(1, 1024, 1024, 1024, interleaved=True),
}


def make(
    form: Form, dtype: torch.dtype, N: int, index: torch.dtype = torch.int64, *, scale: float = 1.0, device: str = "cpu"
) -> StoreContextKV:
    """Random operands: strided rows of kv, caches whose heads are rows of slots, some slots and positions invalid."""
    with torch.device(device):
        return _make(form, dtype, N, index, scale)


def _make(form: Form, dtype: torch.dtype, N: int, index: torch.dtype, scale: float) -> StoreContextKV:
    n, d = form.n, form.d
    columns = n * d * (2 if form.v == "own" else 1)
    kv = (torch.randn(N, columns + 5) * torch.logspace(-2, 2, N).unsqueeze(1) * scale).to(dtype)[:, 2 : 2 + columns]
    gain = None if form.gain == "none" else torch.rand(form.norm_width) + 0.5 - form.norm_offset
    angles = torch.randn(POSITIONS, form.R // 2) * 3
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    positions, slots = torch.randint(POSITIONS, (N,)), torch.randperm(SLOTS)[:N]
    outside = torch.iinfo(index)
    slots[1::7], positions[3::9] = -1, POSITIONS
    if N > 5:
        slots[4], slots[5], positions[2] = SLOTS, outside.max, outside.min
    caches = [torch.full((SLOTS, 2 * n + 1, d + 3), float("nan"), dtype=dtype) for _ in range(2)]
    k_cache, v_cache = caches[0][:, 1 : 1 + 2 * n : 2, 1 : d + 1], caches[1][:, :n, 2 : d + 2]
    if form.gain == "dtype":
        gain, cos_sin = gain.to(dtype), cos_sin.to(dtype)
    values = (kv, gain, form.eps, form.norm_offset, form.norm_width, cos_sin, form.rotary_begin, form.interleaved)
    return StoreContextKV(*values, positions.to(index), slots.to(index), k_cache, None if form.v == "none" else v_cache)


def rows_inside(record: StoreContextKV) -> Tensor:
    slots, positions = record.slots.long(), record.positions.long()
    inside = (slots >= 0) & (slots < record.k_cache.shape[0])
    return (inside & (positions >= 0) & (positions < record.cos_sin.shape[0])).nonzero().squeeze(1)


def bound_of(record: StoreContextKV, truth: Tensor, of_k: bool) -> Tensor:
    """A norm sums d squares in fp32. Norm and rotation round 8 more times, relative to what is added there: at most
    twice the largest number of the head, as |cos| and |sin| are at most 1. One rounding to the dtype follows."""
    dtype, d = record.kv.dtype, record.k_cache.shape[2]
    unturned, _ = record._replace(cos_sin=record.cos_sin[:, :0]).values(rows_inside(record), torch.float64)
    size = 2 * unturned.abs().amax(-1, keepdim=True) if of_k else truth.abs()
    error = (d / 2 + 8) * FP32 * size
    return error + UNIT_ROUNDOFF[dtype] * (truth.abs() + error) + torch.finfo(dtype).smallest_normal


def check_written(record: StoreContextKV) -> None:
    """The slots of the caches, NaN before, hold what float64 says, and the memory beside them is as it was."""
    rows = rows_inside(record)
    slots = record.slots[rows].long()
    for of_k, cache, truth in zip((True, False), record.outputs, record.values(rows, torch.float64), strict=False):
        written, bound = cache[slots].double(), bound_of(record, truth, of_k)
        missed = ((written - truth).abs() > bound) | (written.isnan() & truth.isfinite() & bound.isfinite())
        missed |= truth.isnan() & ~written.isnan()
        assert not missed.any(), f"{'K' if of_k else 'V'}: {int(missed.sum())} of {missed.numel()} elements miss"
        beside = torch.ones(cache._base.shape, dtype=torch.bool, device=cache.device)
        begin = cache.storage_offset() - cache._base.storage_offset()
        beside.as_strided(cache.shape, cache.stride(), begin)[slots] = False
        assert cache._base[beside].isnan().all(), "memory beside the slots was written"


@pytest.mark.parametrize(("N", "index"), [(0, torch.int64), (1, torch.int32), (2, torch.int64), (33, torch.int32)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_matches_float64_and_writes_its_slots_alone(
    dtype: torch.dtype, form: str, N: int, index: torch.dtype, cpu_isa: str
) -> None:
    record = make(FORMS[form], dtype, N, index)
    read = [tensor for tensor in record[:-2] if isinstance(tensor, Tensor)]
    with UnchangedTensors([record.kv._base, *read[1:]]):
        store_context_kv(record)
    check_written(record)
    rows = rows_inside(record)
    slots = record.slots[rows].long()
    if FORMS[form].v == "own":
        of_v = record.kv[rows].unflatten(1, (2, *record.k_cache.shape[1:]))[:, 1]
        assert same_bits(record.v_cache[slots], of_v.contiguous())


def sglang(record: StoreContextKV) -> Tensor:
    """K as SGLang 0.5.23 `_fused_norm_rope_kernel_stacked` computes it: norm and RoPE in fp32, one rounding."""
    k, _ = record.values(rows_inside(record))
    return k.to(record.kv.dtype)


def vllm(record: StoreContextKV) -> Tensor:
    """K as vLLM 0.33 `precompute_and_store_context_kv` does: the normed K, cos and sin rounded, and the rotated K
    (csrc/pos_encoding_kernels.cu multiplies in the model's dtype)."""
    rows, dtype = rows_inside(record), record.kv.dtype
    _, n, d = record.k_cache.shape
    raw = record.kv[rows][:, : n * d].unflatten(1, (n, d))
    k = F.rms_norm(raw.float(), (d,), record.k_norm_weight.float() + record.norm_offset, record.eps).to(dtype)
    cos, sin = record.cos_sin[record.positions[rows].long()].to(dtype).unsqueeze(1).chunk(2, -1)
    first, second = k.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_IDS[:2])
def test_k_is_as_near_to_float64_as_sglangs_and_nearer_than_vllms(dtype: torch.dtype, cpu_isa: str) -> None:
    record = make(FORMS["qwen3"], dtype, 40)._replace(cos_sin=make(FORMS["muse"], dtype, 1).cos_sin.repeat(1, 2))
    rows = rows_inside(record)
    truth, _ = record.values(rows, torch.float64)
    store_context_kv(record)
    ours = record.k_cache[record.slots[rows].long()]
    assert (ours != sglang(record)).float().mean() < 1e-3  # from the order in which squares are summed
    assert relative_rms(ours, truth) <= 1.001 * relative_rms(sglang(record), truth)
    assert relative_rms(ours, truth) < 0.8 * relative_rms(vllm(record), truth)


def test_a_bad_row_stays_in_its_slot(cpu_isa: str) -> None:
    record = make(FORMS["gemma4"], torch.bfloat16, 33)
    other = make(FORMS["gemma4"], torch.bfloat16, 33)._replace(
        **dict(zip(StoreContextKV._fields[:10], record[:10], strict=True))
    )
    store_context_kv(record)
    kv = record.kv.clone()
    rows = rows_inside(record)
    kv[rows[3], 7] = float("nan")
    store_context_kv(other._replace(kv=kv))
    good = [slot for slot in record.slots[rows].tolist() if slot != record.slots[rows[3]]]
    for a, b in zip(record.outputs, other.outputs, strict=True):
        assert same_bits(a[good], b[good])
    assert other.k_cache[record.slots[rows[3]], 0].isnan().all()


def test_a_head_of_zeros_without_eps_stays_zero(cpu_isa: str) -> None:
    record = make(FORMS["gemma4"], torch.float32, 1)._replace(eps=0.0)
    record.kv.zero_()
    store_context_kv(record)
    for cache in record.outputs:
        assert not cache[record.slots].any()


@pytest.mark.parametrize("at", ["begin", "end"])
@pytest.mark.parametrize("form", ["odd-widths", "kimi_k3", "interleaved", "no-norm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_no_operand_is_read_or_written_beyond_its_end(dtype: torch.dtype, form: str, at: str, cpu_isa: str) -> None:
    record = make(FORMS[form], dtype, 7)
    guarded = [
        between_forbidden_pages(value.contiguous(), at) if isinstance(value, Tensor) else value for value in record
    ]
    store_context_kv(StoreContextKV(*guarded))
    store_context_kv(record)
    rows = record.slots[rows_inside(record)].long()
    for cache, expected in zip(StoreContextKV(*guarded).outputs, record.outputs, strict=True):
        assert same_bits(cache[rows], expected[rows].contiguous())


@needs_compiled
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("call", [call for call in BAD_CALLS if call.op == CONTEXT_KV], ids=lambda call: call.id)
def test_every_failed_check_is_worded(call: BadCall, backend: str) -> None:
    torch.manual_seed(0)
    arguments = call.arguments()
    tensors = tensors_of(arguments)
    before = [tensor.clone() for tensor in tensors]
    with environment_of(EAGLE_KERNELS_BACKEND=backend), pytest.raises((TypeError, ValueError)) as raised:
        store_context_kv(StoreContextKV(**arguments))
    message = str(raised.value)
    assert re.match(r"store_context_kv: .*, expected ", message) and not re.search(r"\(\w+\.\w+:\d+\)$", message), (
        message
    )
    assert all(same_bits(now.contiguous(), kept.contiguous()) for now, kept in zip(tensors, before, strict=True))
