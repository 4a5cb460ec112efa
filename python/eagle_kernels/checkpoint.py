"""The weights of a drafter's input stage, read from a checkpoint under the names that engines and trainers write.

Only the layer's own weights are read from the file. A norm that is missing, or that the config does not have, is an
error: engines skip it silently (vLLM 0.33 `llama_eagle3` drops `input_norm`), and drafts are then rejected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import checks
from .checkpoint_files import Checkpoint, Weights, open_checkpoint
from .models import families
from .quantized_checkpoint import (
    OF_WEIGHT,
    UNREAD_CODES,
    check_is_read,
    is_of_activations,
    read_projection,
)
from .quantized_weight import (
    FORMATS,
    QuantizedWeight,
    columns_unsupported_reason,
    concat_columns,
    log_dequantized,
    scale_shape,
)
from .stored_projection import StoredProjection

_Loaded = tuple[dict[str, Tensor], Tensor | QuantizedWeight]  # a state_dict but for the projection's weight, and that

# SpecForge's names before `fc_norm` (SGLang 0.5.23 llama_eagle3 maps them the same way), and Mistral's fc.
_LEGACY_NAMES = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
    "eagle_linear": "fc",
}
# Norms at the top level of a drafter that are not in front of fc: the final norm, and the target's (speculators).
_OTHER_NORMS = ("norm", "verifier_norm")
_NORM = re.compile(r"(?P<norm>\w*norm\w*)(\.\d+)?\.(?P<parameter>.+)")

# Other parts of a model use these names too: a prefix with no other name is a stage only if all its modules are there.
_GENERIC = {"fc", "input_proj", "embed_norm", "hidden_norm"}


def eagle3_projection(weights: Weights, layer: Any) -> _Loaded:
    """What an Eagle3Projection loads: fc, fc_norm.{k} and input_norm; names may start with `model.`."""
    op, config = "Eagle3Projection.load_checkpoint", layer.config
    checkpoint = open_checkpoint(op, weights)
    D, W = config.hidden_size, config.num_chunks * config.target_hidden_size
    expected = _expected(layer, "fc", (D, W))
    found: dict[str, str] = {}
    projection: dict[str, str] = {}
    for name in checkpoint.readers:
        ours = eagle3_name(name)
        if ours.startswith("fc.") and ours != "fc.bias":
            _claim(op, projection, ours.removeprefix("fc."), name, ours)
        elif ours in expected:
            _claim(op, found, ours, name)
        elif ours == "fc.bias" or _is_of_norm_before_fc(ours):
            says = f"the config says K = {config.num_chunks}, chunk_norm {config.chunk_norm}, "
            says += f"concat_norm {config.concat_norm}, bias {config.bias}"
            raise checks.error(ValueError, op, f"weights has {name}", f"only {sorted(expected)}", says)
    meaning = f"(D, K*H) with K = {config.num_chunks} and H = {config.target_hidden_size}"
    return _read(checkpoint, expected, found, "fc", checkpoint.projection(projection, (D, W), meaning))


def norms_before_fc(names: Iterable[str]) -> list[str]:
    """The tensors of norms before fc among a drafter's weights, under our names."""
    return sorted(filter(_is_of_norm_before_fc, map(eagle3_name, names)))


def eagle3_name(name: str) -> str:
    """Our name for a weight of an EAGLE-3 drafter's checkpoint."""
    module, dot, rest = name.removeprefix("model.").partition(".")
    return f"{_LEGACY_NAMES.get(module, module)}{dot}{rest}"


def _is_of_norm_before_fc(ours: str) -> bool:
    """Whether it is a tensor of such a norm, or of a module inside one, which is never read."""
    match = _NORM.fullmatch(ours)
    return match is not None and match["norm"] not in _OTHER_NORMS and not is_of_activations(match["parameter"])


def mtp_projection(weights: Weights, layer: Any, number: int | None) -> _Loaded:
    """What an MTPProjection loads, from the one prefix that has its weights."""
    op, config = "MTPProjection.load_checkpoint", layer.config
    checkpoint = open_checkpoint(op, weights)
    shape = (config.out_features, 2 * config.hidden_size)
    expected = _expected(layer, "eh_proj", shape)
    own_stem, stages = _mtp_stems(), mtp_layers(checkpoint.readers)
    modules = {ours.rpartition(".")[0] for ours in expected}
    stages = {
        prefix: stems
        for prefix, stems in stages.items()
        if not _GENERIC.issuperset(stems.values()) or modules == {own_stem[stem] for stem in stems.values()}
    }
    if number is not None:
        stages = {prefix: stems for prefix, stems in stages.items() if f"layers.{number}." in prefix}
    if len(stages) != 1:
        got = f"weights has MTP layers at {sorted(stages)}" if stages else "weights has no MTP layer"
        expected_one = "one" if number is None else f"one with layers.{number}."
        raise checks.error(ValueError, op, got, expected_one, "layer says which, its names say where")
    ((prefix, stage),) = stages.items()
    found: dict[str, str] = {}
    projection: dict[str, str] = {}
    unread = mtp_norms_inside(checkpoint.readers).get(prefix, {})
    for name, stem in stage.items():
        parameter = name.rpartition(".")[2]
        ours = f"{own_stem[stem]}.{parameter}"
        if own_stem[stem] == "eh_proj" and parameter != "bias":
            _claim(op, projection, parameter, name, ours)
        elif parameter in ("weight", "bias"):
            _claim(op, found, ours, name)
        else:
            unread[name] = parameter
    _check_norms_alone(op, unread)
    for ours, name in found.items():
        if ours not in expected:
            because = "bias is False" if ours.endswith(".bias") else "normed is False"
            raise checks.error(ValueError, op, f"weights has {name}", f"only {sorted(expected)}", because)
    meaning = f"(D, 2H) with H = {config.hidden_size}"
    stored = checkpoint.projection(checkpoint.with_inside(projection), shape, meaning)
    return _read(checkpoint, expected, found, "eh_proj", stored)


def mtp_layers(names: Iterable[str], streams: bool = False) -> dict[str, dict[str, str]]:
    """By the prefix of an MTP layer (`model.layers.61.`): its weights, each with its family's name for the module."""
    known = _mtp_stems(streams)
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        prefix, stem = _split(name)
        if stem in known:
            layers.setdefault(prefix, {})[name] = stem
    return layers


def mtp_norms_inside(names: Iterable[str], streams: bool = False) -> dict[str, dict[str, str]]:
    """By the prefix of an MTP layer: tensors of modules inside its norms, each with what follows the norm's path."""
    known = _mtp_stems(streams)
    norms = {stem for stem, ours in known.items() if ours in ("enorm", "hnorm")}
    inside: dict[str, dict[str, str]] = {}
    for name in names:
        path = name.rpartition(".")[0]
        if norms.isdisjoint(path.split(".")) or _split(name)[1] in known:
            continue
        while path := path.rpartition(".")[0]:
            prefix, stem = _split(f"{path}.weight")
            if stem in norms:
                inside.setdefault(prefix, {})[name] = name[len(path) + 1 :]
                break
    return inside


def mtp_streams_projection(weights: Weights, layer: Any, number: int | None) -> _Loaded:
    """What an MTPStreamsProjection loads; its eh_proj is e_proj and h_proj side by side."""
    op, config = "MTPStreamsProjection.load_checkpoint", layer.config
    checkpoint = open_checkpoint(op, weights)
    own_stem = _mtp_stems(streams=True) | {"eh_proj": "eh_proj"}  # of a saved state_dict
    stages: dict[str, dict[str, dict[str, str]]] = {}  # by prefix and stem, the file's name of each parameter
    for name in checkpoint.readers:
        prefix, stem = _split(name)
        inside = number is None or any(f"{word}.{number}." in prefix for word in ("mtp", "layers"))
        if stem in own_stem and inside:
            parameters = stages.setdefault(prefix, {}).setdefault(own_stem[stem], {})
            _claim(op, parameters, name.rpartition(".")[2], name)
    if len(stages) != 1:
        got = f"weights has MTP layers at {sorted(stages)}" if stages else "weights has no MTP layer of streams"
        raise checks.error(ValueError, op, got, "one", "layer says which, its names say where")
    ((prefix, stage),) = stages.items()
    unread = mtp_norms_inside(checkpoint.readers, streams=True).get(prefix, {})
    for norm in ("enorm", "hnorm"):
        unread |= {name: parameter for parameter, name in stage.get(norm, {}).items() if parameter != "weight"}
    _check_norms_alone(op, unread)
    if "eh_proj" in stage:
        apart = [name for stem in ("e_proj", "h_proj") for name in stage.get(stem, {}).values()]
        _check_one_kind(op, [*stage["eh_proj"].values()], apart)
        stage["eh_proj"] = checkpoint.with_inside(stage["eh_proj"])
        own = {f"{stem}.{parameter}": name for stem, tensors in stage.items() for parameter, name in tensors.items()}
        meanings = {"eh_proj": f"(D, 2H) with H = {config.hidden_size}"}
        saved, weights_read = _own_state(checkpoint, own, layer, meanings, _read_side_by_side)
        return saved, weights_read["eh_proj"]
    shape, meaning = (config.out_features, config.hidden_size), f"(D, H) with H = {config.hidden_size}"
    norms: dict[str, tuple[int, ...]] = {
        f"{name}.weight": tuple(getattr(layer, name).weight.shape) for name in ("enorm", "hnorm")
    }
    names = {ours: stage.get(ours.partition(".")[0], {}).get("weight") for ours in norms}
    found = {ours: name for ours, name in names.items() if name is not None}
    state: dict[str, Tensor] = {}
    parts: dict[str, Tensor | QuantizedWeight] = {}  # by the file's name
    for stem in ("e_proj", "h_proj"):
        expected = norms | {f"{stem}.weight": shape}
        stored = checkpoint.projection(checkpoint.with_inside(stage.get(stem, {})), shape, meaning)
        norms_read, part = _read(checkpoint, expected, found, stem, stored)
        state |= norms_read
        parts[stored.codes_name] = part
    codes = [part for part in parts.values() if isinstance(part, QuantizedWeight)]
    because = columns_unsupported_reason(codes) if len(codes) == len(parts) else "the other one is not quantized"
    if codes and because is None:
        return state, concat_columns(codes)
    dtype = layer.enorm.weight.dtype
    return state, torch.cat([_numbers(op, name, part, dtype, because).to(dtype) for name, part in parts.items()], 1)


def _read_side_by_side(stored: StoredProjection) -> Tensor | QuantizedWeight:
    """`read_projection` of a saved eh_proj: two columns of scales, which no format has, are e_proj's and h_proj's."""
    if _is_side_by_side(stored):
        halves = [read_projection(_half(stored, k)) for k in (0, 1)]
        codes = [half for half in halves if isinstance(half, QuantizedWeight)]
        if columns_unsupported_reason(codes) is None:
            return concat_columns(codes)
    return read_projection(stored)


def _is_side_by_side(stored: StoredProjection) -> bool:
    if not stored.names.keys() >= {"weight", "weight_scale"}:
        return False
    codes, scales = (stored.read(stored.names[parameter]) for parameter in ("weight", "weight_scale"))
    shape = stored.shape
    if not isinstance(codes, Tensor) or not isinstance(scales, Tensor) or tuple(codes.shape) != shape:
        return False
    kinds = [kind for kind in FORMATS.values() if kind.codes == codes.dtype and scales.dtype in kind.scales]
    of_halves = {(1, 2), (shape[0], 2)} - {scale_shape(kind, shape) for kind in kinds}
    return bool(kinds) and tuple(scales.shape) in of_halves


def _half(stored: StoredProjection, number: int) -> StoredProjection:
    """The codes and scales of the first or second half of the columns; for errors their names say which."""
    of_half, tensors = dict(stored.names), {}
    for parameter in ("weight", "weight_scale"):
        name = stored.names[parameter]
        whole = stored.read(name)
        begin, end = (whole.shape[1] * k // 2 for k in (number, number + 1))
        of_half[parameter] = f"{name}[:, {begin}:{end}]"
        tensors[of_half[parameter]] = whole[:, begin:end]
    D, W = stored.shape

    def read(name: str) -> Tensor:
        return tensors[name] if name in tensors else stored.read(name)

    return replace(stored, names=of_half, read=read, shape=(D, W // 2))


def eagle3_qkv_projection(weights: Weights, layer: Any) -> _Loaded:
    """What an Eagle3QKVProjection loads: the rank's rows of the checkpoint's separate projections, joined."""
    op = "Eagle3QKVProjection.load_checkpoint"
    checkpoint, dtype = open_checkpoint(op, weights), layer.hidden_norm.weight.dtype
    readers = checkpoint.readers
    apart = re.compile(rf"(.*\.)?(midlayer|layers\.0)\.(hidden_norm|self_attn\.({'|'.join(layer.rows)}))\.\w+")
    if own := _own_names(checkpoint, layer, "qkv_proj", filter(apart.fullmatch, readers)):
        meanings = {"qkv_proj": f"(R, 2H) with H = {layer.config.hidden_size}"}
        saved, weights_read = _own_state(checkpoint, own, layer, meanings)
        return saved, weights_read["qkv_proj"]
    layers = [name.removesuffix("hidden_norm.weight") for name in readers if name.endswith("hidden_norm.weight")]
    layers = [prefix for prefix in layers if re.fullmatch(r"(.*\.)?(midlayer|layers\.0)\.", prefix)]
    if len(layers) != 1:
        got = f"weights has hidden_norm at {layers}" if layers else "weights has no layer with hidden_norm"
        raise checks.error(ValueError, op, got, "one midlayer or layers.0")
    (prefix,) = layers
    H, has_bias = layer.config.hidden_size, layer.config.bias
    state = {}
    for norm in ("input_layernorm", "hidden_norm"):
        state[f"{norm}.weight"] = _gain(checkpoint, f"{prefix}{norm}.weight", H)
    parts: dict[str, list[Tensor]] = {}
    for name, (begin, end) in layer.rows.items():
        stem, rows = f"{prefix}self_attn.{name}", layer.all_rows[name][1]
        names = {other.rpartition(".")[2]: other for other in readers if other.rpartition(".")[0] == stem}
        names = checkpoint.with_inside(names)
        bias = names.pop("bias", None)
        if bias is not None and not has_bias:
            raise checks.error(ValueError, op, f"weights has {bias}", "none", "bias is False")
        if not names:
            raise checks.error(ValueError, op, f"weights has no {stem}.weight", _EVERY_PROJECTION)
        stored = checkpoint.projection(names, (rows, 2 * H), f"(R, 2H) with H = {H}")
        weight = read_projection(stored)
        weight = _numbers(op, stored.codes_name, weight, dtype, "q, k and v have scales of their own")
        parts.setdefault("qkv_proj.weight", []).append(weight[begin:end])
        if has_bias:
            parts.setdefault("qkv_proj.bias", []).append(_whole(checkpoint, f"{stem}.bias", (rows,))[begin:end])
    state |= {name: torch.cat(rows) for name, rows in parts.items()}
    return state, state.pop("qkv_proj.weight")


# The names of ContextKV's modules in DFlash, Kimi K3, DeepSeek-V4 and Muse Glimmer, in this order. For a layer's norm
# Muse-Spark's name comes before Laguna's, because Muse-Spark also has an input_layernorm, for its queries.
_CONTEXT_NAMES = {
    "fc": ("fc", "context_proj", "main_proj", "encoder.fc"),
    "hidden_norm": ("hidden_norm", "context_norm", "main_norm", "encoder.output_norm_enc"),
}
_QKV = "self_attn.qkv_proj"  # of Laguna's drafters: the rows of Q, of K and of V
_CONTEXT_LAYER_NAMES = {
    "k": ("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa", "attn.wkv"),
    "v": ("self_attn.v_proj",),
    "qkv": (_QKV,),
    "k_norm": ("self_attn.k_norm", "self_attn.kv_a_layernorm", "attn.kv_norm"),
    "layer_norm": ("pre_qkv_proj_norm", "input_layernorm"),
}
_CONTEXT_LAYER = re.compile(
    r"(?P<prefix>(?:.*\.)?(?:layers|mtp)\.)(?P<number>\d+)\.(?:decoder_layer\.)?(?P<stem>.+)\.(?P<parameter>\w+)"
)
# How the prefix of a drafter's layers ends where the target's own may be beside them: DeepSeek-V4's and MiniMax-M3.1's.
_STAGES = ("mtp.", "dspark.layers.")
_Modules = dict[str, dict[str, str]]  # {module: {parameter: the tensor's name in the file}}


def context_kv(
    weights: Weights, layer: Any, tp_rank: int, tp_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor | QuantizedWeight]]:
    """What a ContextKV loads: a state_dict but for the weights of fc and kv_proj, and these, by name.

    kv_proj has this rank's heads of k_proj and v_proj of all layers, dense unless the file is a saved state_dict.
    """
    op, config = "ContextKV.load_checkpoint", layer.config
    checkpoint = open_checkpoint(op, weights)
    readers = checkpoint.readers
    H, Ht = config.hidden_size, config.target_hidden_size
    of_fc = f"(H, K*Ht) with K = {config.num_chunks} and Ht = {Ht}"
    apart = context_modules(readers)
    others = (name for name in readers if name.rpartition(".")[0] in apart and _own_root(name) not in layer._modules)
    if own := _own_names(checkpoint, layer, "kv_proj", others):
        of_kv = f"(L*W, H) with L = {config.num_layers} and W = {config.kv_width}"
        saved, weights_read = _own_state(checkpoint, own, layer, {"fc": of_fc, "kv_proj": of_kv})
        if config.layer_norm:
            because, dtype = "each layer's rows have a norm of their own", layer.hidden_norm.weight.dtype
            weights_read["kv_proj"] = _numbers(op, "kv_proj.weight", weights_read["kv_proj"], dtype, because)
        return saved, weights_read
    top, layers = _context_modules(checkpoint, config.num_layers)

    def norm(modules: _Modules, names: tuple[str, ...], width: int) -> Tensor:
        return _gain(checkpoint, _named(modules, names, "weight"), width)

    state = {"hidden_norm.weight": norm(top, _CONTEXT_NAMES["hidden_norm"], H)}
    aux = [f"aux_hidden_norms.{k}" for k in range(len(layer.aux_norm))]
    for k, stem in enumerate(aux):
        state[f"aux_norm.{k}.weight"] = norm(top, (stem,), Ht)
    for stem, tensors in top.items():
        if stem.startswith("aux_hidden_norms.") and not f"{stem}.".startswith(tuple(f"{each}." for each in aux)):
            expected, because = f"{len(aux)} norms before fc", f"chunk_norm is {config.chunk_norm}"
            raise checks.error(ValueError, op, f"weights has {next(iter(tensors.values()))}", expected, because)
    rows: dict[str, list[Tensor]] = {}
    for number, modules in enumerate(layers):
        if config.layer_norm:
            state[f"layer_norm.{number}.weight"] = norm(modules, _CONTEXT_LAYER_NAMES["layer_norm"], H)
        if config.k_norm == "weight":
            width = config.norm_width
            state[f"k_norm.{number}.weight"] = norm(modules, _CONTEXT_LAYER_NAMES["k_norm"], width)
        for weight, bias in _heads(checkpoint, layer, modules, tp_rank, tp_size):
            rows.setdefault("kv_proj.weight", []).append(weight)
            if bias is not None:
                rows.setdefault("kv_proj.bias", []).append(bias)
    state |= {name: torch.cat(parts) for name, parts in rows.items()}
    fc = next((stem for stem in _CONTEXT_NAMES["fc"] if stem in top), None)
    if fc is None:
        raise checks.error(ValueError, op, "weights has no fc", f"one of {list(_CONTEXT_NAMES['fc'])}")
    stored = checkpoint.projection(checkpoint.with_inside(top[fc]), (H, config.num_chunks * Ht), of_fc)
    return state, {"fc": read_projection(stored), "kv_proj": state.pop("kv_proj.weight")}


_Rows = tuple[Tensor, Tensor | None]  # of a weight, and of its bias


def _heads(checkpoint: Checkpoint, layer: Any, modules: _Modules, tp_rank: int, tp_size: int) -> Iterator[_Rows]:
    """The rows of this rank's heads in a layer's projections, K's before V's."""
    if _QKV in modules:
        yield from _heads_of_qkv(checkpoint, layer, modules, tp_rank, tp_size)
        return
    for part in ("k", "v") if layer.config.values == "own" else ("k",):
        names = _CONTEXT_LAYER_NAMES[part]
        stem = next(filter(modules.__contains__, names), names[0])
        name, stored = _stored_rows(checkpoint, layer, modules, stem)
        heads = _rows_of_rank(checkpoint.op, name, stored.shape[0], layer.config, tp_rank, tp_size)
        weight, bias = _read_rows(checkpoint, layer, modules, stem, stored)
        yield weight[heads], None if bias is None else bias[heads]


def _heads_of_qkv(checkpoint: Checkpoint, layer: Any, modules: _Modules, tp_rank: int, tp_size: int) -> Iterator[_Rows]:
    """The same of one weight [Q; K; V]. It is cut as numbers: a scale may be that of several rows of codes."""
    op, config = checkpoint.op, layer.config
    name, stored = _stored_rows(checkpoint, layer, modules, _QKV)
    others = [stem for part in ("k", "v") for stem in _CONTEXT_LAYER_NAMES[part] if stem in modules]
    if others:
        other = next(iter(modules[others[0]].values()))
        raise checks.error(
            ValueError, op, f"weights has {name} and {other}", "one of them", "both have heads of K or V"
        )
    if config.values != "own":
        raise checks.error(ValueError, op, f"weights has {name}", "K alone", f"values is {config.values!r}")
    of_all = stored.shape[0]
    of_k = _rows_of_k(checkpoint, modules, name, of_all, config, tp_size)
    starts = (of_all - 2 * of_k, of_all - of_k)
    heads = _rows_of_rank(op, f"{name}[{starts[0]}:{starts[1]}]", of_k, config, tp_rank, tp_size)
    weight, bias = _read_rows(checkpoint, layer, modules, _QKV, stored)
    for start in starts:
        rows = slice(start + heads.start, start + heads.stop)
        yield weight[rows], None if bias is None else bias[rows]


def _rows_of_k(checkpoint: Checkpoint, modules: _Modules, name: str, of_all: int, config: Any, tp_size: int) -> int:
    """K's rows, which are as many as V's, among those of [Q; K; V]: o_proj has as many columns as Q has rows.

    Where o_proj is not there or packed, each rank has its own heads of K.
    """
    op, o_proj = checkpoint.op, modules.get("self_attn.o_proj", {}).get("weight")
    o_weight = None if o_proj is None else checkpoint.read(o_proj)
    if isinstance(o_weight, Tensor) and o_weight.dim() == 2 and o_weight.dtype in (*checks.DTYPES, torch.float8_e4m3fn):
        of_k, odd = divmod(of_all - o_weight.shape[1], 2)
        if of_k <= 0 or odd:
            expected = f"{o_weight.shape[1]} of Q, and as many of K as of V"
            raise checks.error(ValueError, op, f"{name} has {of_all} rows", expected, f"{o_proj} has as many columns")
        return of_k
    if config.num_kv_heads == 1 and tp_size > 1:
        because = "the columns of o_proj are the rows of Q, and several ranks may have the same head of K"
        raise checks.error(ValueError, op, f"weights has {name} and no o_proj in numbers", "both", because)
    of_k = config.num_kv_heads * config.head_dim * tp_size
    of_q = of_all - 2 * of_k
    if of_q <= 0 or of_q % of_k:
        expected = f"a multiple of K's {of_k} for Q, and {of_k} each for K and V"
        raise checks.error(ValueError, op, f"{name} has {of_all} rows", expected)
    return of_k


def _stored_rows(checkpoint: Checkpoint, layer: Any, modules: _Modules, stem: str) -> tuple[str, StoredProjection]:
    """A layer's projection with the rows of all ranks, and the name of the tensor that says how many they are."""
    op, config, tensors = checkpoint.op, layer.config, modules.get(stem, {})
    if "bias" in tensors and not config.bias:
        raise checks.error(ValueError, op, f"weights has {tensors['bias']}", "none", "bias is False")
    parameters = checkpoint.with_inside({name: tensors[name] for name in tensors if name != "bias"})
    H = config.hidden_size
    stored = checkpoint.projection(parameters, (0, H), f"(n*d, H) with H = {H}")
    check_is_read(stored)  # before its rows are counted
    first = next((tensors[name] for name in ("weight", "weight_packed", "scales") if name in tensors), None)
    name = first or f"{stem}.weight"
    return name, replace(stored, shape=(_count_rows(checkpoint, name), H))


def _read_rows(checkpoint: Checkpoint, layer: Any, modules: _Modules, stem: str, stored: StoredProjection) -> _Rows:
    because, dtype = "K and V of all layers are one weight", layer.hidden_norm.weight.dtype
    weight = _numbers(checkpoint.op, stored.codes_name, read_projection(stored), dtype, because)
    if not layer.config.bias:
        return weight, None
    return weight, _whole(checkpoint, _named(modules, (stem,), "bias"), stored.shape[:1])


def context_projections(names: Iterable[str]) -> dict[str, list[str]]:
    """The paths of "fc", and of "k" and "v" or "qkv" of every layer, in a DFlash or DSpark drafter's checkpoint."""
    parameters = {*OF_WEIGHT, *UNREAD_CODES}
    paths = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in parameters}
    layers = [match for path in paths if (match := _CONTEXT_LAYER.fullmatch(f"{path}.weight"))]
    of_stages = [match for match in layers if match["prefix"].endswith(_STAGES)]
    found = {"fc": [path for path in paths if _own_name(path) in _CONTEXT_NAMES["fc"]]}
    for part in ("k", "v", "qkv"):
        stems = _CONTEXT_LAYER_NAMES[part]
        found[part] = [match.string.rpartition(".")[0] for match in of_stages or layers if match["stem"] in stems]
    return {part: sorted(some) for part, some in found.items()}


def context_modules(names: Iterable[str]) -> set[str]:
    """The paths of all modules that `context_kv` can read in the checkpoint of a DFlash or DSpark drafter."""
    paths = {name.rpartition(".")[0] for name in names}
    layers = {stem for stems in _CONTEXT_LAYER_NAMES.values() for stem in stems}
    matches = {path: _CONTEXT_LAYER.fullmatch(f"{path}.weight") for path in paths}
    found = {path for path, match in matches.items() if match is not None and match["stem"] in layers}
    return found | {path for path in paths if _is_context_top(_own_name(path))}


def _own_name(path: str) -> str:
    return re.sub(r"^(((language_model\.)?model\.)?dspark\.|(model\.)?(mtp\.\d+\.)?)", "", path)


def _is_context_top(stem: str) -> bool:
    return any(stem in stems for stems in _CONTEXT_NAMES.values()) or stem.startswith("aux_hidden_norms.")


def _context_modules(checkpoint: Checkpoint, num_layers: int) -> tuple[_Modules, list[_Modules]]:
    """The drafter's top modules, and those of each layer: in a target's checkpoint the DSpark stages, `mtp.{l}`."""
    top: _Modules = {}
    found: dict[str, dict[int, _Modules]] = {}
    for name in checkpoint.readers:
        path, _, parameter = name.rpartition(".")
        if _is_context_top(stem := _own_name(path)):  # other names of a target may be there twice
            _claim(checkpoint.op, top.setdefault(stem, {}), parameter, name, f"{stem}.{parameter}")
        if (match := _CONTEXT_LAYER.fullmatch(name)) is not None:
            modules = found.setdefault(match["prefix"], {}).setdefault(int(match["number"]), {})
            modules.setdefault(match["stem"], {})[match["parameter"]] = name
    found = {
        prefix: numbered
        for prefix, numbered in found.items()
        if any(stem in modules for modules in numbered.values() for stem in (*_CONTEXT_LAYER_NAMES["k"], _QKV))
    }
    for ours, stems in _CONTEXT_NAMES.items():
        names: dict[str, str] = {}
        for stem in filter(top.__contains__, stems):
            _claim(checkpoint.op, names, ours, next(iter(top[stem].values())))
    prefixes = [prefix for prefix in found if prefix.endswith(_STAGES)] or list(found)
    if len(prefixes) != 1:
        got = f"weights has layers at {sorted(prefixes)}" if prefixes else "weights has no layer with a K projection"
        raise checks.error(ValueError, checkpoint.op, got, "one drafter's")
    numbered = found[prefixes[0]]
    if sorted(numbered) != list(range(num_layers)):
        got = f"weights has layers {sorted(numbered)} at {prefixes[0]}"
        raise checks.error(ValueError, checkpoint.op, got, f"0 to {num_layers - 1}", f"num_layers is {num_layers}")
    return top, [numbered[number] for number in range(num_layers)]


def _named(modules: _Modules, names: tuple[str, ...], parameter: str) -> str:
    """The file's name for a parameter of the one module in `names` that is there; else ours, for the error message."""
    stem = next((stem for stem in names if stem in modules), names[0])
    return modules.get(stem, {}).get(parameter, f"{stem}.{parameter}")


def _count_rows(checkpoint: Checkpoint, name: str) -> int:
    op = checkpoint.op
    if name not in checkpoint.readers:
        raise checks.error(ValueError, op, f"weights has no {name}", "k and v of every layer, and their norms")
    checks.check_tensor(op, name, weight := checkpoint.read(name))
    if weight.dim() != 2:
        raise checks.shape_error(op, name, weight, "(n*d, H)")
    return weight.shape[1 if name.endswith(".scales") else 0]  # GPTQ's codes are transposed


def _rows_of_rank(op: str, name: str, all_rows: int, config: Any, tp_rank: int, tp_size: int) -> slice:
    """The rank's rows of K or V; with fewer heads than ranks several ranks have the same head."""
    head = config.head_dim
    heads = all_rows // head
    uneven = all_rows % head or not heads or (heads % tp_size and tp_size % heads)
    if uneven or max(heads // tp_size, 1) != config.num_kv_heads:
        expected = f"{config.num_kv_heads} heads of {head} rows for each of {tp_size} ranks"
        raise checks.error(ValueError, op, f"{name} has {all_rows} rows", expected)
    begin = tp_rank * heads // tp_size * head
    return slice(begin, begin + config.num_kv_heads * head)


def _numbers(op: str, name: str, weight: Tensor | QuantizedWeight, dtype: torch.dtype, because: str | None) -> Tensor:
    """The weight, dequantized if it is codes: for a layer that cannot keep them."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    log_dequantized(op, name, weight.format, dtype, because or "")
    return weight.dequantize(dtype)


_EVERY_PROJECTION = "every projection of the layer and its norms"


def _whole(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    op = checkpoint.op
    if name not in checkpoint.readers:
        raise checks.error(ValueError, op, f"weights has no {name}", _EVERY_PROJECTION)
    tensor = checkpoint.read(name)
    checks.check_tensor(op, name, tensor)
    checks.check_dtype(op, name, tensor, checks.DTYPES)
    if tuple(tensor.shape) != shape:
        raise checks.shape_error(op, name, tensor, str(shape))
    return tensor


def _gain(checkpoint: Checkpoint, name: str, width: int) -> Tensor:
    """The weight of a norm, which has no other tensor and no module inside it."""
    gain, path = _whole(checkpoint, name, (width,)), name.removesuffix("weight")
    others = (other for other in checkpoint.readers if other.startswith(path) and other != name)
    _check_norms_alone(checkpoint.op, {other: other.removeprefix(path) for other in others})
    return gain


def _check_norms_alone(op: str, unread: Mapping[str, str]) -> None:
    """Refuse tensors of norms that are not read, given with what follows the norm's path: a bias, LoRA's matrices."""
    for name, parameter in unread.items():
        if not is_of_activations(parameter):
            expected, because = "a norm to have its weight alone", "what the tensor makes of it would be lost"
            raise checks.error(ValueError, op, f"weights has {name}", expected, because)


def _expected(layer: Any, projection: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's state_dict, as if its projection were dense."""
    own = {
        name: tuple(value.shape)
        for name, value in layer.state_dict().items()
        if name == f"{projection}.bias" or not name.startswith(f"{projection}.")
    }
    return {f"{projection}.weight": shape} | own


@functools.cache
def _mtp_stems(streams: bool = False) -> dict[str, str]:
    """Our names (enorm, hnorm, and eh_proj or the e_proj and h_proj of streams) by the name in each family."""
    stages = [family.mtp for family in families().values() if family.mtp is not None and family.mtp.streams == streams]
    ours = ("enorm", "hnorm", *(("e_proj", "h_proj") if streams else ("eh_proj",)))
    return {theirs: ours[k - len(stage.names)] for stage in stages for k, theirs in enumerate(stage.names)}


def _split(name: str) -> tuple[str, str]:
    """model.layers.61.enorm.weight -> ("model.layers.61.", "enorm").

    LongCat writes enorm.m.weight, Ernie model.mtp_emb_norm.0.weight for the first of several layers.
    """
    stem = name.rpartition(".")[0]
    prefix, dot, last = stem.removesuffix(".m").rpartition(".")
    if last.isdigit():
        before, dot, last = prefix.rpartition(".")
        return f"{before}{dot}layers.{stem.rpartition('.')[2]}.", last
    return prefix + dot, last


def _claim(op: str, found: dict[str, str], key: str, name: str, ours: str = "") -> None:
    if key in found:
        because = f"both are {ours or key}"
        raise checks.error(ValueError, op, f"weights has {found[key]} and {name}", "one of them", because)
    found[key] = name


def _read(
    checkpoint: Checkpoint,
    expected: dict[str, tuple[int, ...]],
    found: dict[str, str],
    stem: str,
    stored: StoredProjection,
    read: Callable[[StoredProjection], Tensor | QuantizedWeight] = read_projection,
) -> _Loaded:
    """The tensors of `found`, and the projection that the module calls `stem`."""
    op = checkpoint.op
    for ours in expected:
        if ours not in found and not (stored.names and ours == f"{stem}.weight"):
            raise checks.error(ValueError, op, f"weights has no {ours}", f"all of {sorted(expected)}")
    state = {ours: checkpoint.read(name) for ours, name in found.items()}
    for ours, tensor in state.items():
        checks.check_tensor(op, found[ours], tensor)
        if tuple(tensor.shape) != expected[ours]:
            raise checks.shape_error(op, found[ours], tensor, str(expected[ours]))
        checks.check_dtype(op, found[ours], tensor, checks.DTYPES)
    return state, read(stored)


def _own_names(checkpoint: Checkpoint, layer: Any, projection: str, apart: Iterable[str]) -> dict[str, str]:
    """The file's names of a saved state_dict by the module's, which `model.` may precede; {} for any other file.

    Only a saved state_dict has the joined `projection`; `apart` are a checkpoint's names for what it is joined from.
    """
    paths = {name: name.removeprefix("model.").rpartition(".")[0] for name in checkpoint.readers}
    joined = [name for name, path in paths.items() if path == projection]
    _check_one_kind(checkpoint.op, joined, apart)
    names: dict[str, str] = {}
    for name in paths if joined else ():
        if _own_root(name) in layer._modules:
            _claim(checkpoint.op, names, name.removeprefix("model."), name)
    return names


def _own_root(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def _check_one_kind(op: str, joined: Iterable[str], apart: Iterable[str]) -> None:
    ours, theirs = next(iter(joined), None), next(iter(apart), None)
    if ours is not None and theirs is not None:
        because = "the first is of a saved state_dict, the second of a checkpoint"
        raise checks.error(ValueError, op, f"weights has {ours} and {theirs}", "one of them", because)


def _own_state(
    checkpoint: Checkpoint,
    names: Mapping[str, str],
    layer: Any,
    meanings: Mapping[str, str],
    read: Callable[[StoredProjection], Tensor | QuantizedWeight] = read_projection,
) -> tuple[dict[str, Tensor], dict[str, Tensor | QuantizedWeight]]:
    """What a module loads from a saved state_dict, but for the projections' weights, and these.

    Args:
        names: the file's name of each tensor, by the module's.
        meanings: what the shape of each projection's weight is, by the projection's name.
    """
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in layer.state_dict().items()
        if name.rpartition(".")[0] not in meanings or name.endswith(".bias")
    }
    found: dict[str, str] = {}
    tensors: dict[str, dict[str, str]] = {stem: {} for stem in meanings}
    for ours, name in names.items():
        stem, _, parameter = ours.partition(".")
        if stem in meanings and parameter != "bias":
            tensors[stem][parameter] = name
        elif ours in shapes:
            found[ours] = name
        else:
            expected = sorted([*shapes, *(f"{projection}.weight" for projection in meanings)])
            because = "the config has no other"
            raise checks.error(ValueError, checkpoint.op, f"weights has {name}", f"only {expected}", because)
    state: dict[str, Tensor] = {}
    weights: dict[str, Tensor | QuantizedWeight] = {}
    for stem, meaning in meanings.items():
        linear = getattr(layer, stem)
        shape = (linear.out_features, linear.in_features)
        stored = checkpoint.projection(tensors[stem], shape, meaning)
        expected_shapes = shapes | {f"{stem}.weight": shape}
        state, weights[stem] = _read(checkpoint, expected_shapes, found, stem, stored, read)
    return state, weights
