"""The context of vLLM's DFlash and DSpark drafters: hidden_norm and the K and V of all draft layers in one op, then the
norm and the rotation of K in one pass per layer.

vLLM projects the context eagerly on every engine step, by a weight [L*2*n*d, H] that it stacks when it loads the
drafter, copies K and V apart, norms K and rotates it. `precompute_and_store_context_kv` of a loaded drafter is
replaced, or `_project_context_kv` alone where `store_context_kv` cannot run. The write into the cache stays vLLM's, as
its layout and dtype are the attention backend's.

Laguna has no hidden_norm here but a norm in each layer: one op per layer, into the columns of that layer. Gemma 4
projects K alone, and its V is K after a norm without a gain. In Muse Spark hidden_norm, each layer's own norm and the
projection are replaced; in Beam hidden_norm and the projection, as norm, rotation and write are one kernel of vLLM's.

Where vLLM's rms_norm applies one gain to all layers, as on CPU (0.32) and as it did on XPU (vllm#56431), K, and
Laguna's context, are normed layer by layer.
"""

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import DTYPES
from ...ops.store_context_kv import MAX_HEAD_DIM, StoreContextKV, store_context_kv
from ..decision import Call, Decision, normal_rows
from ..eligibility import log_once, norm_unsupported_reason
from ..gates import Target
from ..projection import MAX_DIFFERENCE, EngineProjection, ProbeError, check_backend, parameter_of, relative_difference
from . import LOGGER, normed_linear
from .combine import BEAM, DFLASH, LAGUNA
from .registry import BOTH, ONLY_033, batch_invariant_reason, hook_models, leaving_to_vllm, when_loaded

MUSE_SPARK = ("MuseSparkDSparkModel",)
ARCHITECTURES = (*DFLASH, *LAGUNA, *BEAM, *MUSE_SPARK)
_MODEL = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model"
_STORE = ("self", "context_states", "context_positions", "context_slot_mapping")
PROJECT = Target(
    f"{_MODEL}._project_context_kv",
    ("self", "context_states", "num_ctx", "num_layers", "num_kv_heads", "head_dim"),
    # The second body is Laguna's and the third one Gemma 4's, here and below.
    {"f10fe7949ed550be": BOTH, "9443ea4a4d1692e9": BOTH, "e58269d8a7657297": BOTH},
)
BUFFERS = Target(
    f"{_MODEL}._build_context_kv_buffers",
    ("self", "layers_attn", "has_bias"),
    {"b2455c0fd0aa3b44": BOTH, "9148c8bd88c15a2e": BOTH, "aefc519877b8fb84": BOTH},
)
NORMALIZE = Target(f"{_MODEL}._normalize_context_k", ("self", "all_k"), {"12dac2d398bd3680": BOTH})
STORE = Target(f"{_MODEL}.precompute_and_store_context_kv", _STORE, {"80ad4d7dc101bc18": BOTH})
_BEAM_MODEL = "vllm.models.beam.nvidia.dflash2:DFlash2BeamModel"
BEAM_STORE = Target(f"{_BEAM_MODEL}.precompute_and_store_context_kv", _STORE, {"7608ba69498d17bf": ONLY_033})
BEAM_TARGETS = (
    BEAM_STORE,
    Target(f"{_BEAM_MODEL}.build_context_kv_weights", ("self",), {"2ece7020c2ae986b": ONLY_033}),
    Target(f"{_BEAM_MODEL}._store_fused_context_kv", ("self", "kv", "positions", "slot_mapping")),
)
_MUSE_MODEL = "vllm.models.muse_spark.common.dspark:MuseSparkDSparkModel"
MUSE_PROJECT = Target(
    f"{_MUSE_MODEL}._project_muse_context_kv", ("self", "context_states"), {"0109ff63e075273b": ONLY_033}
)
MUSE_TARGETS = (
    MUSE_PROJECT,
    Target(f"{_MUSE_MODEL}._build_fused_kv_buffers", ("self",), {"33ed6cad79ec72bf": ONLY_033}),
)
QWEN_TARGETS = (PROJECT, BUFFERS, NORMALIZE, STORE)
TARGETS = (*QWEN_TARGETS, *BEAM_TARGETS, *MUSE_TARGETS)


def register() -> None:
    hook_models(ARCHITECTURES, hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose context is projected by the op once its weights are loaded."""

    def fuse(loaded: Any, max_rows: int) -> None:
        put_in_where_faster(loaded.model, max_rows)

    return when_loaded(drafter, "K and V", lambda _, config: config.max_rows, fuse)


# vLLM's names of the stacked weight and bias of all layers, by which models are told apart: [L, W, H] and [L, W] in
# models that norm by layer, [L*W, H] and [L*W] in others.
_BY_LAYER = (("_kv_weights", "_kv_biases"), ("_stacked_kv_weight", None))
_STACKED = (("_fused_kv_weight", "_fused_kv_bias"), ("_fused_k_weight", "_fused_k_bias"), ("_context_kv_weight", None))


@dataclass(frozen=True, eq=False)
class _Stacked:
    """The buffers of a drafter's model as they are now: vLLM stacks them anew when weights are updated.

    names: those of weight and bias in the model.  layer: which one of a model that norms by layer; None for all.
    """

    model: Any
    names: tuple[str, str | None]
    layer: int | None = None

    @property
    def weight(self) -> Tensor:
        return self._of_layer(getattr(self.model, self.names[0]))

    @property
    def bias(self) -> Tensor | None:
        bias = None if self.names[1] is None else getattr(self.model, self.names[1])
        return bias if bias is None else self._of_layer(bias)

    def _of_layer(self, stacked: Any) -> Any:
        if self.names not in _BY_LAYER:
            return stacked
        return stacked.flatten(0, 1) if self.layer is None else stacked[self.layer]


def _stacked(model: Any) -> _Stacked | None:
    """None where vLLM has not stacked the weights."""
    names = [names for names in (*_BY_LAYER, *_STACKED) if hasattr(model, names[0])]
    return _Stacked(model, names[0]) if names else None


@dataclass(frozen=True, eq=False)
class _ContextNorm:
    """hidden_norm, or the norm of one of Laguna's layers."""

    model: Any
    layer: int | None = None

    @property
    def weight(self) -> Tensor:
        if self.layer is None:
            return self.model._hidden_norm_weight
        return self.model._input_layernorm_weights[self.layer]

    @property
    def variance_epsilon(self) -> float:
        return self.model._rms_norm_eps


def _norms_by_layer(model: Any) -> bool:
    """Whether it is Laguna's, whose context has no norm of its own."""
    return hasattr(model, "_input_layernorm_weights")


def _values_are_keys(model: Any) -> bool:
    """Whether it has Gemma 4's k_eq_v."""
    return hasattr(model, "_fused_k_weight")


@dataclass(frozen=True, eq=False)
class _ByLayer(EngineProjection):
    """[N, L*W] from one projection per layer, all of the same states, which `in_front` norms first where it is set."""

    layers: Sequence[EngineProjection] = ()
    in_front: EngineProjection | None = None

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        out: Tensor | None = None,
        indices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        (states,), (index,) = [chunks] if isinstance(chunks, Tensor) else chunks, indices or [None]
        if self.in_front is not None:
            states = self.in_front.normed(states)
        columns = [parameter_of(layer.fc).shape[0] for layer in self.layers]
        rows = states.shape[0] if index is None else index.shape[0]
        made = states.new_empty(rows, sum(columns)) if out is None else out
        for layer, of_layer in zip(self.layers, made.split(columns, 1), strict=True):
            layer.forward(states, of_layer, indices)
        return made

    __call__ = forward


def _projection(model: Any) -> EngineProjection:
    stacked: Any = _stacked(model)
    if stacked.names in _STACKED:
        norm = model.hidden_norm if _is_beam(model) else _ContextNorm(model)
        return EngineProjection(stacked, 1, concat_norm=norm)
    if _is_muse(model):
        norms, offset = model._context_pre_norms, model.hidden_norm.fused_gain_center
    else:
        norms, offset = [_ContextNorm(model, layer) for layer in range(model._num_attn_layers)], 0.0
    layers = [
        EngineProjection(replace(stacked, layer=layer), 1, concat_norm=norm, norm_offset=offset)
        for layer, norm in enumerate(norms)
    ]
    in_front = None
    if _is_muse(model):
        in_front = EngineProjection(stacked, 1, concat_norm=model.hidden_norm, norm_offset=offset)
    return _ByLayer(stacked, 1, concat_norm=norms[0], layers=layers, in_front=in_front)


def _is_beam(model: Any) -> bool:
    return hasattr(model, "_store_fused_context_kv")


def _is_muse(model: Any) -> bool:
    return hasattr(model, "_project_muse_context_kv")


class _ContextStage:
    """Replaces a method of a drafter's model at the row counts of its decision.

    target: the method.  runs: the ops, for log lines.
    """

    target: Target
    runs: str

    def __init__(self, model: Any) -> None:
        self.model = model
        self.method = self.target.where.rpartition(".")[2]
        self.name = f"{type(model).__name__}.{self.method}"
        self.own = getattr(model, self.method)
        self.projection = _projection(model)
        self.decision = Decision()

    @property
    def sizes(self) -> tuple[int, int, int]:
        """L, n, d."""
        return self.model._num_attn_layers, self.model._num_kv_heads, self.model._head_dim

    def ours_or_none(self, N: int, *arguments: Any) -> Any:
        """The result of our ops; None where vLLM's own method is to run."""
        if self.decision.runs_op(N):
            try:
                return self.keys_and_values(*arguments)
            except Exception as failure:
                self.decision = Decision()
                log_once(LOGGER, logging.WARNING, f"{self.name} stays with vLLM, {self.runs} failed: {failure!r}")
        return None

    def keys_and_values(self, *arguments: Any) -> Any:
        """K and V, each [L, N, n, d]; together [L, N, 2*n*d] for Muse Spark and [N, L, 2, n, d] for Beam."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """[N, L*W], what our projection gives, by vLLM's own method."""
        keys, values = self.model._project_context_kv(x, x.shape[0], *self.sizes)
        parts = (keys,) if _values_are_keys(self.model) else (keys, values)
        return torch.stack(parts).permute(2, 1, 0, 3, 4).flatten(1)

    def calls(self) -> list[Call]:
        """vLLM's own method and ours, as timed, on states [N, H]."""
        raise NotImplementedError


class KeysAndValues(_ContextStage):
    """Replaces `_project_context_kv`."""

    target, runs = PROJECT, "norm_concat_linear"

    def __call__(self, states: Tensor, N: int, L: int, n: int, d: int) -> tuple[Tensor, Tensor]:
        made = self.ours_or_none(N, states)
        return self.own(states, N, L, n, d) if made is None else made

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        L, n, d = self.sizes
        apart = self.projection(states).view(states.shape[0], L, -1, n, d).permute(2, 1, 0, 3, 4).contiguous()
        return apart[0], apart[1] if len(apart) == 2 else self._normed(apart[0])

    def _normed(self, keys: Tensor) -> Tensor:
        """Gemma 4's V, normed as vLLM's own method does."""
        model, values = self.model, torch.empty_like(keys)
        sys.modules[NORMALIZE.module].ops.rms_norm(values, keys, model._v_norm_weights, model._rms_norm_eps)
        return values

    def calls(self) -> list[Call]:
        return [lambda x: self.own(x, x.shape[0], *self.sizes), self.keys_and_values_of]

    def keys_and_values_of(self, x: Tensor) -> Any:
        return self.keys_and_values(x)


class MuseKeysAndValues(_ContextStage):
    """Replaces `_project_muse_context_kv`."""

    target, runs = MUSE_PROJECT, "norm_concat_linear"

    def __call__(self, states: Tensor) -> Tensor:
        made = self.ours_or_none(states.shape[0], states)
        return self.own(states) if made is None else made

    def keys_and_values(self, states: Tensor) -> Tensor:
        return self.projection(states).unflatten(1, (self.sizes[0], -1)).transpose(0, 1)

    def product(self, x: Tensor) -> Tensor:
        return self.own(x).transpose(0, 1).flatten(1)

    def calls(self) -> list[Call]:
        return [self.own, self.keys_and_values]


class BeamContext(_ContextStage):
    """Replaces `precompute_and_store_context_kv` of Beam, whose norm, rotation and write stay one kernel."""

    target, runs = BEAM_STORE, "norm_concat_linear"

    @property
    def sizes(self) -> tuple[int, int, int]:
        attention = self.model.layers[0].self_attn
        return len(self.model.layers), attention.num_kv_heads, attention.head_dim

    def __call__(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        kv = self.ours_or_none(context_states.shape[0], context_states)
        if kv is None:
            self.own(context_states, context_positions, context_slot_mapping)
        else:
            self.model._store_fused_context_kv(kv, context_positions, context_slot_mapping)

    def keys_and_values(self, states: Tensor) -> Tensor:
        L, n, d = self.sizes
        return self.projection(states).view(states.shape[0], L, 2, n, d)

    def product(self, x: Tensor) -> Tensor:
        """What vLLM's own method passes to its kernel."""
        made: list[Tensor] = []
        self.model.__dict__["_store_fused_context_kv"] = lambda kv, *_: made.append(kv)
        try:
            self.own(x, None, None)
        finally:
            del self.model.__dict__["_store_fused_context_kv"]
        return made[0].flatten(1)

    def calls(self) -> list[Call]:
        return [lambda x: self.own(x, None, None), self.keys_and_values]


class Context(_ContextStage):
    """Replaces `precompute_and_store_context_kv`."""

    target, runs = STORE, "norm_concat_linear and store_context_kv"

    def __call__(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mapping: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        made = self.ours_or_none(context_states.shape[0], context_states, context_positions)
        if made is None:
            self.own(context_states, context_positions, context_slot_mapping)
        elif context_slot_mapping is not None:
            keys, values = made
            self._write(keys, values, context_slot_mapping)

    def keys_and_values(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        model, (L, n, d), N = self.model, self.sizes, states.shape[0]
        kv = self.projection(states)
        made, rows = kv.new_empty(2, L, N, n, d), torch.arange(N, device=kv.device)
        cos_sin = model._rope_cos_sin_cache
        if cos_sin.dtype not in (kv.dtype, torch.float32):
            cos_sin = cos_sin.to(kv.dtype)
        rotary = (cos_sin, 0, not model._rope_is_neox)
        for layer, of_layer in enumerate(kv.unflatten(1, (L, -1)).unbind(1)):
            norm = (model._k_norm_weights[layer], model._rms_norm_eps, 0.0, d)
            store_context_kv(StoreContextKV(of_layer, *norm, *rotary, positions, rows, made[0, layer], made[1, layer]))
        return made[0], made[1]

    def _write(self, keys: Tensor, values: Tensor, slots: Tensor | Sequence[Tensor | None]) -> None:
        """Write keys and values into the cache, as vLLM's own method ends."""
        if (scale := getattr(self.model.layers[0].self_attn, "v_scale", None)) is not None:
            values.mul_(scale)
        for layer, attention in enumerate(self.model._attn_layers):
            of_layer = slots[layer] if isinstance(slots, list | tuple) else slots
            if of_layer is not None:
                cache = attention.kv_cache
                attention.impl.do_kv_cache_update(attention, keys[layer], values[layer], cache, of_layer)

    def positions(self, N: int) -> Tensor:
        """Those of a trial call."""
        cos_sin = self.model._rope_cos_sin_cache
        return torch.arange(N, device=cos_sin.device) % cos_sin.shape[0]

    def calls(self) -> list[Call]:
        positions = functools.cache(self.positions)

        def own(x: Tensor) -> Any:
            return self.own(x, positions(x.shape[0]), None)

        def ours(x: Tensor) -> Any:
            return self.keys_and_values(x, positions(x.shape[0]))

        return [own, ours]

    def probe(self) -> None:
        """Raise ProbeError where vLLM's own method makes other keys and values, or ours does not run."""
        check_backend("store_context_kv", self.projection.fc.weight.device)
        states = normal_rows(3, self.projection.fc.weight.shape[1], self.projection.fc.weight)
        positions = self.positions(3)
        recorder = _Recorder()
        attention, self.model._attn_layers = self.model._attn_layers, [recorder] * self.sizes[0]
        try:
            self.own(states, positions, positions)
            self._write(*self.keys_and_values(states, positions), positions)
        finally:
            self.model._attn_layers = attention
        half = len(recorder.written) // 2
        for expected, got in zip(recorder.written[:half], recorder.written[half:], strict=True):
            # vLLM's RoPE rounds to the model's dtype three times more.
            difference = max(map(relative_difference, got, expected))
            if not difference <= MAX_DIFFERENCE:
                raise ProbeError(f"{self.runs} give other values than vLLM: {difference:.2g} of their size apart")


class _Recorder:
    """Stands in for an attention layer and its backend, and records what is written into the cache."""

    kv_cache = None

    def __init__(self) -> None:
        self.impl = self
        self.written: list[tuple[Tensor, Tensor]] = []

    def do_kv_cache_update(self, layer: object, key: Tensor, value: Tensor, cache: None, slots: Tensor) -> None:
        self.written.append((key.clone(), value.clone()))


@dataclass(frozen=True, eq=False)
class _Candidate(normed_linear.Candidate):
    stage: _ContextStage

    def engine(self, x: Tensor) -> Tensor:
        return self.product(x)

    def calls(self) -> list[Call]:
        return self.stage.calls()


def put_in_where_faster(model: Any, max_rows: int) -> None:
    """Have the model's context run on the ops, or log why not."""
    for target in targets_of(model):
        target.check(getattr(type(model), target.where.rpartition(".")[2]))
    name = f"{type(model).__name__}.{STORE.where.rpartition('.')[2]}"
    if hasattr(model, "_k_norm_weights"):
        _give_each_layer_its_gain(model)
    unsupported = _unsupported_reason(model)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    stage = _stage(model)
    candidate = _Candidate(
        stage.name, stage.projection, stage.product, max_rows, compiled=False, replicated=False, stage=stage
    )
    _, stage.decision = normed_linear.decide(candidate)
    figures = stage.decision.figures("vLLM")
    if stage.decision.never:
        because = f"{stage.runs} {'are' if isinstance(stage, Context) else 'is'} not faster, {figures}"
        log_once(LOGGER, logging.INFO, f"{stage.name} stays with vLLM: {because if stage.decision.rows else figures}")
        return
    model.__dict__[stage.method] = stage
    where = "" if stage.decision.always else " where it is faster"
    log_once(LOGGER, logging.INFO, f"{stage.name} runs {stage.runs}{where}; {figures}")


def targets_of(model: Any) -> tuple[Target, ...]:
    """The targets of a drafter's model, or of its class."""
    return BEAM_TARGETS if _is_beam(model) else MUSE_TARGETS if _is_muse(model) else QWEN_TARGETS


def _stage(model: Any) -> _ContextStage:
    """The stage to decide on: the whole method where that runs, else the projection alone."""
    if _is_beam(model):
        return BeamContext(model)
    if _is_muse(model):
        return MuseKeysAndValues(model)
    context = Context(model)
    with leaving_to_vllm(f"the norm and rotation of keys in {context.name}"):
        if model._head_dim > MAX_HEAD_DIM:
            raise ProbeError(f"heads of {model._head_dim} columns, and at most {MAX_HEAD_DIM} are supported")
        context.probe()
        return context
    return KeysAndValues(model)


def _give_each_layer_its_gain(model: Any) -> None:
    """Norm K layer by layer where vLLM's norm, given a gain for each layer, applies the first one to all."""
    rms_norm = sys.modules[NORMALIZE.module].ops.rms_norm
    gains = model._k_norm_weights.new_tensor([[1.0], [2.0]]).repeat(1, model._head_dim)
    ones = torch.ones_like(gains)[:, None, None]
    normed = torch.empty_like(ones)
    rms_norm(normed, ones, gains, 1e-6)
    if normed[1].mean().item() < 1.5:
        model.__dict__["_normalize_context_k"] = functools.partial(_normed_by_layer, rms_norm, model)
        if _norms_by_layer(model):
            model.__dict__["_project_context_kv"] = functools.partial(_projected_by_layer, rms_norm, model)
        because = "vLLM's norm has one gain for all layers here (vllm#56431)"
        log_once(
            LOGGER, logging.INFO, f"{type(model).__name__} norms the keys of its context layer by layer: {because}"
        )


def _normed_by_layer(rms_norm: Any, model: Any, all_k: Tensor) -> Tensor:
    normed = torch.empty_like(all_k)
    for of_layer, keys, gain in zip(normed, all_k, model._k_norm_weights, strict=True):
        rms_norm(of_layer, keys, gain, model._rms_norm_eps)
    return normed


def _projected_by_layer(
    rms_norm: Any, model: Any, states: Tensor, N: int, L: int, n: int, d: int
) -> tuple[Tensor, Tensor]:
    """Laguna's `_project_context_kv`, but for the norm, which is applied layer by layer."""
    normed = states.new_empty(L, *states.shape)
    for of_layer, gain in zip(normed, model._input_layernorm_weights, strict=True):
        rms_norm(of_layer, states, gain, model._rms_norm_eps)
    kv = torch.bmm(normed, model._kv_weights.transpose(1, 2))
    if model._kv_biases is not None:
        kv += model._kv_biases[:, None]
    keys, values = kv.view(L, N, 2, n, d).permute(2, 0, 1, 3, 4).contiguous()
    return keys, values


def _unsupported_reason(model: Any) -> str | None:
    if (unsupported := batch_invariant_reason()) is not None:
        return unsupported
    if (stacked := _stacked(model)) is None:
        return "vLLM has not stacked its weights"
    weight = stacked.weight
    if weight is None or weight.dtype not in DTYPES:
        return "its K and V are quantized"
    return _norms_unsupported_reason(model, weight.dtype)


def _norms_unsupported_reason(model: Any, dtype: torch.dtype) -> str | None:
    """For the models whose norms are read as modules."""
    if _is_beam(model):
        return norm_unsupported_reason(model.hidden_norm, {sys.modules[BEAM_STORE.module].RMSNorm}, dtype)
    if not _is_muse(model):
        return None
    known, norms = {sys.modules[MUSE_PROJECT.module].MuseSpark1xRMSNorm}, [model.hidden_norm, *model._context_pre_norms]
    for norm in norms:
        if (unsupported := norm_unsupported_reason(norm, known, dtype)) is not None:
            return unsupported
    return None if len({norm.fused_gain_center for norm in norms}) == 1 else "its norms add several numbers to gains"
