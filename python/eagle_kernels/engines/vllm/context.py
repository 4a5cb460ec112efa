"""The context of vLLM's DFlash drafters: hidden_norm and the K and V of all draft layers in one op, and behind it the
norm and the rotation of K, one pass a layer.

vLLM projects the context eagerly on every engine step, by a weight [L*2*n*d, H] that it stacks when it loads the
drafter, copies K and V apart, norms K and rotates it. Replaced is `precompute_and_store_context_kv` of a loaded drafter
on a CPU; on a GPU, where no table has figures for what is behind the projection, `_project_context_kv` alone. The write
into the cache stays vLLM's, whose layout and dtype are the attention backend's.

Laguna has no hidden_norm here, but a norm of each layer's own: one op a layer, into the columns of that layer.

Where vLLM's rms_norm takes one gain for all layers, as on CPU (0.32) and as it did on XPU (vllm#56431), K, and Laguna's
context, are normed layer by layer.
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
from ...environment import EngineSwitches
from ...ops.store_context_kv import MAX_HEAD_DIM, StoreContextKV, store_context_kv
from ..decision import Call, Decision, normal_rows
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection, ProbeError, check_backend, relative_difference
from . import LOGGER, normed_linear
from .combine import DFLASH, LAGUNA
from .registry import hook_models, leaving_to_vllm, when_loaded

ARCHITECTURES = (*DFLASH, *LAGUNA)
_MODEL = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model"
_BOTH = ("0.32.0", "0.33.0")
PROJECT = Target(
    f"{_MODEL}._project_context_kv",
    ("self", "context_states", "num_ctx", "num_layers", "num_kv_heads", "head_dim"),
    {"f10fe7949ed550be": _BOTH, "9443ea4a4d1692e9": _BOTH},  # the second one is Laguna's, here and below
)
BUFFERS = Target(
    f"{_MODEL}._build_context_kv_buffers",
    ("self", "layers_attn", "has_bias"),
    {"b2455c0fd0aa3b44": _BOTH, "9148c8bd88c15a2e": _BOTH},
)
NORMALIZE = Target(f"{_MODEL}._normalize_context_k", ("self", "all_k"), {"12dac2d398bd3680": _BOTH})
STORE = Target(
    f"{_MODEL}.precompute_and_store_context_kv",
    ("self", "context_states", "context_positions", "context_slot_mapping"),
    {"80ad4d7dc101bc18": _BOTH},
)
TARGETS = (PROJECT, BUFFERS, NORMALIZE, STORE)

_switches = EngineSwitches(frozenset(), False, ())


def register(switches: EngineSwitches) -> None:
    global _switches
    # Ranks have the rows of their own heads, which no sum over ranks may mix.
    _switches = replace(switches, parts=switches.parts - {"row_parallel"})
    hook_models(ARCHITECTURES, hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose context is projected by the op once its weights are loaded."""

    def fuse(loaded: Any, max_rows: int) -> None:
        put_in_where_faster(loaded.model, max_rows)

    return when_loaded(drafter, "K and V", lambda _, config: config.max_rows, fuse)


@dataclass(frozen=True, eq=False)
class _Stacked:
    """The buffers of a drafter's model as they are now: vLLM stacks them anew when weights are updated.

    layer: of Laguna's, which are stacked [L, ...]; all of them where it is None.
    """

    model: Any
    layer: int | None = None

    @property
    def weight(self) -> Tensor:
        if not _norms_by_layer(self.model):
            return self.model._fused_kv_weight
        weights = self.model._kv_weights
        return weights.flatten(0, 1) if self.layer is None else weights[self.layer]

    @property
    def bias(self) -> Tensor | None:
        if not _norms_by_layer(self.model):
            return self.model._fused_kv_bias
        biases = self.model._kv_biases
        return biases if biases is None or self.layer is None else biases[self.layer]


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
    return hasattr(model, "_input_layernorm_weights")


@dataclass(frozen=True, eq=False)
class _ByLayer(EngineProjection):
    """[N, L*W] of one projection a layer, which all read the same states."""

    layers: Sequence[EngineProjection] = ()

    def forward(
        self,
        chunks: Sequence[Tensor] | Tensor,
        out: Tensor | None = None,
        indices: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        (states,), (index,) = [chunks] if isinstance(chunks, Tensor) else chunks, indices or [None]
        columns = [layer.fc.weight.shape[0] for layer in self.layers]
        rows = states.shape[0] if index is None else index.shape[0]
        made = states.new_empty(rows, sum(columns)) if out is None else out
        for layer, of_layer in zip(self.layers, made.split(columns, 1), strict=True):
            layer.forward(states, of_layer, indices)
        return made

    __call__ = forward


def _projection(model: Any) -> EngineProjection:
    if not _norms_by_layer(model):
        return EngineProjection(_Stacked(model), 1, concat_norm=_ContextNorm(model))
    layers = [
        EngineProjection(_Stacked(model, layer), 1, concat_norm=_ContextNorm(model, layer))
        for layer in range(model._num_attn_layers)
    ]
    return _ByLayer(_Stacked(model), 1, concat_norm=layers[0].concat_norm, layers=layers)


class _Stage:
    """Takes the place of a method of a drafter's model at the row counts of its decision.

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

    def ours_or_none(self, N: int, *arguments: Any) -> tuple[Tensor, Tensor] | None:
        """K and V of our ops, each [L, N, n, d]; None where vLLM's own method is to run."""
        if self.decision.runs_op(N):
            try:
                return self.keys_and_values(*arguments)
            except Exception as failure:
                self.decision = Decision()
                log_once(LOGGER, logging.WARNING, f"{self.name} stays with vLLM, {self.runs} failed: {failure!r}")
        return None

    def keys_and_values(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def calls(self) -> list[Call]:
        """vLLM's own method and ours, as timed, on states [N, H]."""
        raise NotImplementedError


class KeysAndValues(_Stage):
    """In place of `_project_context_kv`."""

    target, runs = PROJECT, "norm_concat_linear"

    def __call__(self, states: Tensor, N: int, L: int, n: int, d: int) -> tuple[Tensor, Tensor]:
        made = self.ours_or_none(N, states)
        return self.own(states, N, L, n, d) if made is None else made

    def keys_and_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        L, n, d = self.sizes
        apart = self.projection(states).view(-1, L, 2, n, d).permute(2, 1, 0, 3, 4).contiguous()
        return apart[0], apart[1]

    def calls(self) -> list[Call]:
        return [lambda x: self.own(x, x.shape[0], *self.sizes), self.keys_and_values_of]

    def keys_and_values_of(self, x: Tensor) -> Any:
        return self.keys_and_values(x)


class Context(_Stage):
    """In place of `precompute_and_store_context_kv`."""

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
            self._write(*made, context_slot_mapping)

    def keys_and_values(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        model, (L, n, d), N = self.model, self.sizes, states.shape[0]
        kv = self.projection(states)
        made, rows = kv.new_empty(2, L, N, n, d), torch.arange(N, device=kv.device)
        cos_sin = model._rope_cos_sin_cache
        if cos_sin.dtype not in (kv.dtype, torch.float32):
            cos_sin = cos_sin.to(kv.dtype)
        rotary = (cos_sin, 0, not model._rope_is_neox)
        for layer, of_layer in enumerate(kv.view(N, L, 2 * n * d).unbind(1)):
            norm = (model._k_norm_weights[layer], model._rms_norm_eps, 0.0, d)
            store_context_kv(StoreContextKV(of_layer, *norm, *rotary, positions, rows, made[0, layer], made[1, layer]))
        return made[0], made[1]

    def _write(self, keys: Tensor, values: Tensor, slots: Tensor | Sequence[Tensor | None]) -> None:
        """As vLLM's own method ends."""
        if (scale := getattr(self.model.layers[0].self_attn, "v_scale", None)) is not None:
            values.mul_(scale)
        for layer, attention in enumerate(self.model._attn_layers):
            of_layer = slots[layer] if isinstance(slots, list | tuple) else slots
            if of_layer is not None:
                cache = attention.kv_cache
                attention.impl.do_kv_cache_update(attention, keys[layer], values[layer], cache, of_layer)

    def positions(self, N: int) -> Tensor:
        """Of a trial call."""
        cos_sin = self.model._rope_cos_sin_cache
        return torch.arange(N, device=cos_sin.device) % cos_sin.shape[0]

    def calls(self) -> list[Call]:
        def own(x: Tensor) -> Any:
            return self.own(x, self.positions(x.shape[0]), None)

        def ours(x: Tensor) -> Any:
            return self.keys_and_values(x, self.positions(x.shape[0]))

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
            # RoPE of vLLM rounds to the model's dtype three times more.
            difference = max(map(relative_difference, got, expected))
            if not difference <= _MAX_DIFFERENCE:
                raise ProbeError(f"{self.runs} give other values than vLLM: {difference:.2g} of their size apart")


_MAX_DIFFERENCE = 0.05


class _Recorder:
    """In place of an attention layer and its backend: what is written into a cache."""

    kv_cache = None

    def __init__(self) -> None:
        self.impl = self
        self.written: list[tuple[Tensor, Tensor]] = []

    def do_kv_cache_update(self, layer: object, key: Tensor, value: Tensor, cache: None, slots: Tensor) -> None:
        self.written.append((key.clone(), value.clone()))


@dataclass(frozen=True, eq=False)
class _Candidate(normed_linear.Candidate):
    """product: `_project_context_kv` of vLLM, on the states alone."""

    stage: _Stage

    def engine(self, x: Tensor) -> Tensor:
        keys, values = self.product(x)
        return torch.stack((keys, values)).permute(2, 1, 0, 3, 4).flatten(1)

    def calls(self) -> list[Call]:
        return self.stage.calls()


def put_in_where_faster(model: Any, max_rows: int) -> None:
    """Have the model's context run on the ops, or log why not."""
    for target in TARGETS:
        target.check(getattr(type(model), target.where.rpartition(".")[2]))
    name = f"{type(model).__name__}.{STORE.where.rpartition('.')[2]}"
    if hasattr(model, "_k_norm_weights"):
        _give_each_layer_its_gain(model)
    unsupported = _unsupported_reason(model)
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} stays with vLLM: {unsupported}")
        return
    own = model._project_context_kv

    def product(x: Tensor) -> Any:
        return own(x, x.shape[0], model._num_attn_layers, model._num_kv_heads, model._head_dim)

    stage = _stage(model)
    candidate = _Candidate(stage.name, stage.projection, product, max_rows, False, _switches, stage)
    _, stage.decision = normed_linear.decide(candidate)
    figures = stage.decision.figures("vLLM")
    if stage.decision.never:
        because = f"{stage.runs} {'is' if stage.target is PROJECT else 'are'} not faster, {figures}"
        log_once(LOGGER, logging.INFO, f"{stage.name} stays with vLLM: {because if stage.decision.rows else figures}")
        return
    model.__dict__[stage.method] = stage
    where = "" if stage.decision.always else " where it is faster"
    log_once(LOGGER, logging.INFO, f"{stage.name} runs {stage.runs}{where}; {figures}")


def _stage(model: Any) -> _Stage:
    """What is to be decided on: all of it where that can be timed or is forced, else the projection alone."""
    if _switches.force or _is_on_cpu(model):
        context = Context(model)
        with leaving_to_vllm(f"the norm and rotation of keys in {context.name}"):
            if model._head_dim > MAX_HEAD_DIM:
                raise ProbeError(f"heads of {model._head_dim} columns, and at most {MAX_HEAD_DIM} are supported")
            context.probe()
            return context
    return KeysAndValues(model)


def _is_on_cpu(model: Any) -> bool:
    return _Stacked(model).weight.device.type == "cpu"


def _give_each_layer_its_gain(model: Any) -> None:
    """Norm K layer by layer where vLLM's norm, given a gain for each layer, takes the first one for all."""
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
    """Laguna's `_project_context_kv` but for the norm."""
    normed = states.new_empty(L, *states.shape)
    for of_layer, gain in zip(normed, model._input_layernorm_weights, strict=True):
        rms_norm(of_layer, states, gain, model._rms_norm_eps)
    kv = torch.bmm(normed, model._kv_weights.transpose(1, 2))
    if model._kv_biases is not None:
        kv += model._kv_biases[:, None]
    keys, values = kv.view(L, N, 2, n, d).permute(2, 0, 1, 3, 4).contiguous()
    return keys, values


def _unsupported_reason(model: Any) -> str | None:
    import vllm.envs

    if vllm.envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels"
    if not hasattr(model, "_num_attn_layers"):
        return "vLLM has not stacked its weights"
    weight = _Stacked(model).weight
    if weight is None or weight.dtype not in DTYPES:
        return "its K and V are quantized"
    return None
