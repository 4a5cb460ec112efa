"""The compiled primitives, called with the arguments of the public ops."""

import torch
from torch import Tensor

from eagle_kernels.ops.sources import NORMS
from eagle_kernels.ops.store_context_kv import StoreContextKV

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def run_primitive(ops: object, op: str, arguments: dict) -> None:
    """Calls `<op>_out` of the op namespace as registered for CPU, without the dispatcher's choice, which would send a
    call with an operand on another device to that device."""
    getattr(ops, f"{op}_out").default.redispatch(_CPU, *_ADAPTERS[op](**arguments))


def tensors_of(arguments: dict) -> list[Tensor]:
    """The arguments that have values."""
    flat = [entry for value in arguments.values() for entry in (value if isinstance(value, (list, tuple)) else [value])]
    return [entry for entry in flat if isinstance(entry, Tensor) and entry.untyped_storage().data_ptr()]


def _listed(value: object) -> list:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _sources(
    chunks: list[Tensor] | Tensor,
    num_chunks: int | None,
    norm: str,
    norm_weight: list[Tensor] | Tensor | None,
    eps: float | list[float],
    norm_offset: float,
    residuals: list[Tensor | None] | None,
    indices: list[Tensor | None] | Tensor | None,
    sum_squares: Tensor | None,
) -> tuple:
    chunks = _listed(chunks)
    code = NORMS.index(norm) if norm in NORMS else len(NORMS)
    num_chunks = len(chunks) if num_chunks is None else num_chunks
    lists = (_listed(norm_weight), _listed(eps), norm_offset, _listed(residuals) or None, _listed(indices) or None)
    return (chunks, num_chunks, code, *lists, sum_squares)


def _norm_concat(out: Tensor, **sources: object) -> tuple:
    return (*_sources(**sources), out)


def _norm_concat_linear(
    weight: Tensor, bias: Tensor | None, post_norm_weight: Tensor | None, out: Tensor, **sources: object
) -> tuple:
    eps, post_norm_eps = sources["eps"], 0.0
    if post_norm_weight is not None:
        eps, post_norm_eps = (eps[:-1], eps[-1]) if isinstance(eps, list) else (eps, eps)
    return (*_sources(**sources | {"eps": eps}), weight, bias, post_norm_weight, post_norm_eps, out)


def _norm_concat_linear_quantized(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None,
    block: tuple[int, int],
    bias: Tensor | None,
    post_norm_weight: Tensor | None,
    out: Tensor,
    kernel: int = 0,
    early_weight: bool = True,
    **sources: object,
) -> tuple:
    *operands, _, bias, post, post_eps, out = _norm_concat_linear(codes, bias, post_norm_weight, out, **sources)
    return (*operands, codes, scales, global_scale, *block, bias, post, post_eps, kernel, early_weight, out)


def _capture_hidden(hidden: Tensor, residual: Tensor | None, out: Tensor, sum_squares: Tensor | None) -> tuple:
    return hidden, residual, out, sum_squares


def _store_context_kv(**record: object) -> tuple:
    return tuple(StoreContextKV(**record))


def _add_rms_norm(
    hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, norm_offset: float, out: Tensor, out_sum: Tensor
) -> tuple:
    return hidden, residual, weight, eps, norm_offset, out, out_sum


def _vocab_parallel_embedding(ids: Tensor, weight: Tensor, shard: object, scale: object, out: Tensor) -> tuple:
    bounds = shard
    if not isinstance(shard, tuple):
        bounds = (shard.org_begin, shard.org_end, shard.added_begin, shard.added_end, shard.added_row)
    scales = (None, scale) if isinstance(scale, Tensor) else (scale, None)
    return ids, weight, *bounds, *scales, out


_ADAPTERS = {
    "norm_concat": _norm_concat,
    "norm_concat_linear": _norm_concat_linear,
    "norm_concat_linear_quantized": _norm_concat_linear_quantized,
    "capture_hidden": _capture_hidden,
    "add_rms_norm": _add_rms_norm,
    "store_context_kv": _store_context_kv,
    "vocab_parallel_embedding": _vocab_parallel_embedding,
}
