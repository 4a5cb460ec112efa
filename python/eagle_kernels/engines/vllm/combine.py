"""`combine_hidden_states` of vLLM's EAGLE-3, DFlash and DSpark drafters on the ops.

vLLM runs it eagerly on every engine step: 28 kernel launches for K = 3 with `fc_norm` (vLLM 0.33, default config).
Here one op does norms and projection, at the row counts where that is faster (`decision.py`); in the V2 speculators
(`speculator.py`) it also takes the captured layers as they are and writes into the engine's static buffer.
"""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...checks import DTYPES
from ...layers import child_of
from ...plan import Problem, choose, cpu_isa
from ...quantized_weight import COMPRESSED, CompressedWeight, quantize
from .. import decision, engine_codes
from ..decision import Decision
from ..eligibility import is_column_shard, linear_unsupported_reason, log_once, norm_unsupported_reason
from ..engine_codes import EngineCodes
from ..gates import Target, TargetError
from ..projection import EngineProjection, ProbeError, check_backend, parameter_of, probe
from . import LOGGER, cpu_packing, registry, speculator, tensor_parallel
from .registry import BOTH, ONLY_033, batch_invariant_reason, hook_models, is_on, leaving_to_vllm

EAGLE3 = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "Eagle3Qwen3ForCausalLM",
    "PeagleQwen3ForCausalLM",
    "Eagle3DeepseekV2ForCausalLM",
    "Eagle3DeepseekV3ForCausalLM",
)
# All of one class, or of a subclass that adds a head.
DFLASH = (
    "DFlashDraftModel",
    "MuseGlimmerAssistantModel",
    "DFlashMuseGlimmerAssistantModel",
    "DFlash2DraftModel",
    "LiLiCorrDraftModel",
    "Qwen3DSparkModel",
    "Qwen3OmniDSparkModel",
    "Qwen3XPressModel",
    "DFlashQwen3XPressModel",
    "Gemma4DSparkModel",
)
LAGUNA = ("DFlashLagunaForCausalLM",)
BEAM = ("DFlash2BeamDraftModel",)
# fc and the norm behind it, in a method of their models.
DSPARK = ("DSparkDraftModel", "DSparkV41DraftModel", "K3DSparkModel")
ARCHITECTURES = (*EAGLE3, *DFLASH, *LAGUNA, *BEAM, *DSPARK)
PACKED = "its weight is packed for vLLM's own CPU product"
# The methods that leave the weight in a layout of `engine_codes`.
QUANTIZED = frozenset(
    f"vllm.model_executor.layers.quantization.{where}"
    for where in (
        "fp8:Fp8LinearMethod",
        "modelopt:ModelOptLinearMethod",
        "compressed_tensors.compressed_tensors:CompressedTensorsLinearMethod",
    )
)
# How much faster the one op on a second copy of the weight has to be at some row count to be worth its bytes.
SECOND_COPY = 1.1


def register() -> None:
    hook_models(ARCHITECTURES, hooked)


def hooked(drafter: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the drafter whose combine_hidden_states runs on the ops, where that method is vLLM's own."""
    method = getattr(drafter, "combine_hidden_states", None)
    if method is None:
        raise TargetError("combine_hidden_states is not there")
    for known in METHODS:
        if known.target.module == method.__module__:
            known.target.check(method)
            if known.of_model is not None:
                known.of_model.find()
            members = {"__module__": __name__, "_read_modules": staticmethod(known.read), "_fc_name": known.fc}
            return type(drafter.__name__, (FusedCombine, drafter), members)
    raise TargetError(f"combine_hidden_states is that of {method.__module__}, not vLLM's own")


# A drafter class of vLLM, which has no types here, nor do its model and its configs.
_Base: Any = object


@dataclass(frozen=True)
class CombineStage:
    """What runs a drafter's combine_hidden_states, and at which row counts.

    whole: tried first, the one op on a copy of a weight that vLLM packed (dense or in 12 bits per number), or on the
    codes of a quantized one.
    """

    projection: EngineProjection
    decision: Decision
    whole: "CombineStage | None" = None

    @property
    def never(self) -> bool:
        return self.decision.never and self.whole is None

    def projection_at(self, T: int) -> EngineProjection | None:
        """What runs a call of T rows; None is vLLM's own path."""
        if self.whole is not None and self.whole.decision.runs_op(T) and self.whole.projection.fc.is_current:
            return self.whole.projection
        return self.projection if self.decision.runs_op(T) else None


class FusedCombine(_Base):
    """Mixed in before a drafter class of vLLM."""

    _fc_name = "fc"
    _stage: CombineStage | None = None
    _stage_of: Any = ...  # the fc that `_stage` was planned for

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with leaving_to_vllm(f"{type(self).__name__}'s number of chunks"):
            _state_num_chunks(vllm_config.speculative_config.draft_model_config.hf_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._max_rows = vllm_config.scheduler_config.max_num_batched_tokens
        with leaving_to_vllm(f"{type(self).__name__}.model.fc's weight"):
            _keep_dense_on_cpu(self)

    def process_weights_after_loading(self) -> None:
        """vLLM's hook on a model, once its layers have their final form."""
        if hasattr(super(), "process_weights_after_loading"):
            super().process_weights_after_loading()
        self.eagle_kernels_stage()
        if is_on("zero_copy"):
            speculator.hook()

    @property
    def eagle_kernels_name(self) -> str:
        return f"{type(self).__name__}.combine_hidden_states"

    def eagle_kernels_stage(self) -> CombineStage | None:
        """The stage on the ops, planned once per fc, and anew when LoRA has wrapped fc after loading."""
        fc = child_of(child_of(self, "model"), self._fc_name)
        if fc is not self._stage_of:
            object.__setattr__(self, "_stage_of", fc)  # not through nn.Module, which would register it again
            self._stage = None
            with leaving_to_vllm(self.eagle_kernels_name):
                self._stage = plan(self)
            if self._stage is None and cpu_packing.is_kept_dense(_base_layer(fc)):
                cpu_packing.pack(_base_layer(fc))
            if not self._runs_op():
                self._leave_to_vllm()
        return self._stage

    def _runs_op(self) -> bool:
        return self._stage is not None and self._stage.projection.is_worthwhile and is_on("combine")

    def _leave_to_vllm(self) -> None:
        """Put vLLM's method in front of `combine_hidden_states` below, which by itself costs 10 us out of cold caches
        (H=128, no norm: 97 us in all against 87)."""
        object.__setattr__(self, "combine_hidden_states", super().combine_hidden_states)

    def eagle_kernels_projection(self) -> EngineProjection | None:
        """What the zero-copy route runs, one projection at all row counts, as a CUDA graph has one; else None."""
        stage = self.eagle_kernels_stage()
        return stage.projection if stage is not None and stage.decision.always else None

    def eagle_kernels_give_up(self, failure: Exception) -> None:
        """Leave the stage to vLLM from now on: a call of the op failed."""
        self._stage = None
        self._leave_to_vllm()
        log_once(LOGGER, logging.WARNING, f"{self.eagle_kernels_name} stays with vLLM from now on: {failure!r}")

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        stage = self.eagle_kernels_stage()  # which puts vLLM's method in front where that is to run
        if stage is not None and "combine_hidden_states" not in self.__dict__:
            projection = stage.projection_at(hidden_states.shape[0] if hidden_states.dim() > 1 else 1)
            if projection is not None:
                try:
                    return projection(hidden_states)
                except Exception as failure:
                    self.eagle_kernels_give_up(failure)
        return super().combine_hidden_states(hidden_states)


def plan(drafter: Any) -> CombineStage | None:
    """What runs this drafter's projection; None is vLLM's own path. Either way one line says so."""
    projection, unsupported = _read(drafter)
    if projection is None:
        log_once(LOGGER, logging.INFO, f"{drafter.eagle_kernels_name} stays with vLLM: {unsupported}")
        return None
    stage = _decide(drafter, projection)
    log_once(LOGGER, logging.INFO, f"{drafter.eagle_kernels_name} {_sentence(stage)}")
    return None if stage.never else stage


def _sentence(stage: CombineStage) -> str:
    projection, decision = stage.projection, stage.decision
    if stage.whole is not None:
        one_op, figures_beside = stage.whole.projection, stage.whole.decision.figures
        if isinstance(one_op.fc, EngineCodes):
            where = f"where that is faster than vLLM's fc, {figures_beside('vLLM')}"
        else:
            weight = one_op.fc.weight
            kind = "an exact copy in 12 bits" if isinstance(weight, CompressedWeight) else "a dense copy"
            where = f"on {kind} of its weight ({weight.nbytes / 1e6:.3g} MB) where that is faster than the packed one, "
            where += figures_beside("packed")
        return f"runs {one_op.op} ({one_op.kind}) {where}; else {_sentence(replace(stage, whole=None))}"
    if not projection.is_worthwhile and not decision.never:
        return "stays with vLLM: it has no norm to fuse (the zero-copy route needs none)"
    sizes, figures = f"({projection.kind})", decision.figures("vLLM")
    if decision.never:
        return f"stays with vLLM: {f'{projection.op} {sizes} is not faster, ' if decision.rows else ''}{figures}"
    if not is_on("combine"):
        return "stays with vLLM: EAGLE_KERNELS_VLLM_COMBINE=0 (the zero-copy route runs)"
    fc = "" if projection.fc_unsupported is None else f", its fc stays with vLLM: {projection.fc_unsupported}"
    where = "" if decision.always else " where it is faster"
    return f"runs {projection.op} {sizes}{where}{fc}; {figures}"


def _read(drafter: Any) -> tuple[EngineProjection | None, str | None]:
    """The projection on the drafter's modules, or why there is none. Reads no data."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if (unsupported := batch_invariant_reason()) is not None:
        return None, unsupported
    modules = drafter._read_modules(drafter.model)
    if modules is None:
        return None, "it has no fc (use_aux_hidden_state is False)"
    fc = modules["fc"]
    dtype = getattr(_base_layer(fc), "params_dtype", None)
    if dtype not in DTYPES:
        return None, f"its fc is {dtype}"
    norms = [*modules.get("chunk_norms", ()), modules.get("concat_norm"), modules.get("post_norm")]
    for norm in filter(None, norms):
        if (unsupported := norm_unsupported_reason(norm, {RMSNorm}, dtype)) is not None:
            return None, unsupported
    modules["fc_unsupported"] = linear_unsupported_reason(fc, {UnquantizedLinearMethod}, bias=True)
    if modules["fc_unsupported"] is not None and not any(norms[:-1]) and read_codes(fc) is None:
        return None, f"it has no norm, and its fc is vLLM's: {modules['fc_unsupported']}"
    return EngineProjection(**modules), None


def _base_layer(fc: Any) -> Any:
    """What LoRA wraps."""
    return getattr(fc, "base_layer", fc)


def _decide(drafter: Any, projection: EngineProjection) -> CombineStage:
    fc = _base_layer(projection.fc)
    like = torch.empty(0, dtype=fc.params_dtype, device=next(fc.parameters()).device)
    engine = super(FusedCombine, drafter).combine_hidden_states
    if is_on("row_parallel"):
        split = tensor_parallel.split(drafter.eagle_kernels_name, projection, like, drafter._max_rows, engine)
        if split is not None:
            return CombineStage(*split)
    fc_codes = read_codes(projection.fc)
    codes = None if fc_codes is None else replace(projection, fc=fc_codes, fc_unsupported=None)
    if registry.switches.force:
        if codes is not None:
            projection = codes
        elif cpu_packing.is_kept_dense(fc) and not _fused_kernel_reads(fc):
            cpu_packing.pack(fc)
            projection = replace(projection, fc_unsupported=projection.fc_unsupported or PACKED)
        probe(projection, fc.input_size, like, drafter._max_rows, engine)
        return CombineStage(projection, decision.FORCED)
    if not projection.is_worthwhile and codes is None:
        return CombineStage(projection, Decision(reason="it has no norm to fuse"))
    if not is_on("combine") and like.device.type == "cpu":
        return CombineStage(projection, Decision(reason="EAGLE_KERNELS_VLLM_COMBINE=0"))
    return _timed(drafter, projection, like, codes)


def _timed(drafter: Any, projection: EngineProjection, like: Tensor, codes: EngineProjection | None) -> CombineStage:
    """The fastest of the layouts of fc's weight: dense, for the one op, or vLLM's packed one after norm_concat or after
    vLLM's own norms. For a quantized weight, the one op on its codes beside vLLM's fc."""
    fc, rows = _base_layer(projection.fc), decision.rows_up_to(drafter._max_rows)
    check_backend(projection.op, like.device)
    engine = super(FusedCombine, drafter).combine_hidden_states
    candidates, dense = _layouts(projection, fc, like.dtype, codes)
    for candidate in candidates:
        candidate.use_huge_pages()

    def check() -> None:
        for candidate in candidates:
            probe(candidate, fc.input_size, like, drafter._max_rows, engine)

    norms = (len(projection.chunk_norms), projection.concat_norm is None, projection.post_norm is None)
    weight = (fc.output_size, type(fc.quant_method), candidates[0].fc_unsupported)
    key = (drafter.eagle_kernels_name, *norms, *weight, *(candidate.kind for candidate in candidates))
    calls, agree = [engine, *candidates], tensor_parallel.agreed_seconds
    theirs, *ours = decision.timed(key, calls, rows, fc.input_size, like, check, agree)
    stage = _fastest(candidates, rows, theirs, ours, in_copies=dense is not None)
    if dense is not None and stage.projection is candidates[1]:
        cpu_packing.unpack(fc, dense)
        return replace(stage, projection=projection)
    return stage


def _layouts(
    projection: EngineProjection, fc: Any, dtype: torch.dtype, codes: EngineProjection | None
) -> tuple[list[EngineProjection], Any]:
    """(what is timed beside vLLM's path, the dense weight of an fc that this packs): the projection with vLLM's fc,
    then the one op on its codes, or on a dense weight and on one in 12 bits per number where vLLM multiplies a packed
    one."""
    dense = cpu_packing.pack(fc) if cpu_packing.is_kept_dense(fc) else None
    # Where vLLM has no layout of its own, it multiplies the dense weight, and both can read it.
    if dense is None or projection.fc_unsupported is not None or fc.weight.numel() > 0:
        return [projection] if codes is None else [projection, codes], None
    candidates = [replace(projection, fc_unsupported=PACKED), replace(projection, fc=dense)]
    if _may_compress(dtype):
        compressed = quantize(parameter_of(dense), COMPRESSED)
        candidates.append(replace(projection, fc=replace(dense, weight=compressed)))
    return candidates, dense


def _fastest(
    candidates: list[EngineProjection],
    rows: tuple[int, ...],
    theirs: tuple[float, ...],
    ours: list[tuple[float, ...]],
    in_copies: bool,
) -> CombineStage:
    """The fastest by the geometric mean over the row counts, at none of which it is slower than vLLM.

    theirs, ours: seconds of a call of vLLM and of each candidate at these row counts.
    in_copies: all candidates but the first, of vLLM's own fc, read another copy of the weight. The second one's may
        take the place of vLLM's; a copy beside it has to be clearly faster at some row count.
    """
    in_front = Decision(rows, theirs, ours[0])
    stage, seconds = CombineStage(candidates[0], in_front), in_front.seconds
    if len(candidates) == 1:
        return stage
    everywhere = Decision(rows, theirs, ours[1], everywhere=True)
    if everywhere.slowest >= 1 and math.prod(everywhere.seconds) < math.prod(seconds):
        stage, seconds = CombineStage(candidates[1], everywhere), everywhere.seconds
        if not in_copies:
            return stage
    for candidate, of_candidate in zip(candidates[1:], ours[1:], strict=True):
        over_other = Decision(rows, tuple(map(min, theirs, ours[0])), of_candidate)
        gain = max(now / then for now, then in zip(seconds, over_other.seconds, strict=True))
        is_faster = math.prod(over_other.seconds) < math.prod(seconds)
        if gain >= SECOND_COPY and is_faster if in_copies else not over_other.never:
            stage = CombineStage(candidates[0], in_front, CombineStage(candidate, over_other))
            seconds = over_other.seconds
    return stage


def _may_compress(dtype: torch.dtype) -> bool:
    """Whether a weight in 12 bits per number may be faster to read. With AMX it is (K=3, H=D=4096, 2 threads: 2.7 and
    2.8 ms at T = 1 and 16, 3.4 and 3.6 ms in bf16); on other CPUs widening it costs what it saves, or more."""
    return dtype == torch.bfloat16 and cpu_isa() == "amx_bf16"


def read_codes(linear: Any, *, column_shard: bool = False) -> EngineCodes | None:
    """`engine_codes.read` of a layer of vLLM, but for FP8 blocks on a CPU: vLLM's kernels for these, all for AMX,
    reorder the codes within a tensor of the same shape.

    column_shard: as in `eligibility.linear_unsupported_reason`. To probe a layer that gathers takes all ranks.
    """
    codes = engine_codes.read(linear, QUANTIZED)
    if codes is not None and not column_shard and is_column_shard(linear):
        return None
    if codes is not None and codes.weight.format.startswith("fp8_block") and linear.weight.device.type == "cpu":
        return None
    return codes


def _read_eagle3(model: Any) -> dict | None:
    if not getattr(model, "use_aux_hidden_state", True):
        return None
    # Qwen 3 calls the count num_aux_layers; DeepSeek has no norm before fc.
    num_chunks = model.num_aux_layers if hasattr(model, "num_aux_layers") else model.num_aux_hidden_states
    concat_norm = model.input_norm if getattr(model, "norm_before_fc", False) else None
    return {"fc": model.fc, "num_chunks": num_chunks, "concat_norm": concat_norm, "chunk_norms": model.fc_norm or ()}


def _read_dflash(model: Any) -> dict | None:
    # Beam's model has no such switch.
    return {"fc": model.fc, "num_chunks": None} if getattr(model, "use_aux_hidden_state", True) else None


def _read_laguna(model: Any) -> dict:
    chunk_norms = model.aux_hidden_norms
    return {"fc": model.fc, "num_chunks": len(chunk_norms), "chunk_norms": chunk_norms, "post_norm": model.hidden_norm}


def _read_deepseek_v4(model: Any) -> dict:
    return {"fc": model.main_proj, "num_chunks": len(model.target_layer_ids), "post_norm": model.main_norm}


def _read_kimi_k3(model: Any) -> dict:
    return {"fc": model.context_proj, "num_chunks": model.config.num_target_layers, "post_norm": model.context_norm}


_MODELS = "vllm.model_executor.models"


@dataclass(frozen=True)
class Method:
    """A combine_hidden_states of vLLM.

    target: who defines it.  read: a drafter's model -> the arguments of its EngineProjection.  fc: its name there.
    of_model: the model's method, where the drafter's own only calls it.
    """

    target: Target
    read: Callable[[Any], dict | None]
    fc: str = "fc"
    of_model: Target | None = None

    @property
    def targets(self) -> tuple[Target, ...]:
        return (self.target,) if self.of_model is None else (self.target, self.of_model)


def _target(owner: str, body: str, versions: tuple[str, ...] = BOTH, states: str = "hidden_states") -> Target:
    return Target(f"{owner}.combine_hidden_states", ("self", states), {body: versions})


def _deepseek_v4(module: str) -> Method:
    """On NVIDIA and XPU; AMD's classes have the same text, and import on AMD alone."""
    drafter, model = (f"vllm.models.{module}.dspark:DSparkDeepseekV4{name}" for name in ("ForCausalLM", "Model"))
    called = _target(drafter, "2a30698c1e0b425a", states="aux_hidden_states")
    of_model = _target(model, "2f0b5053f2bed158", states="aux_hidden_states")
    return Method(called, _read_deepseek_v4, "main_proj", of_model)


_K3 = "vllm.models.kimi_k3.nvidia.dspark_mla:K3DSpark"
METHODS = (
    Method(_target(f"{_MODELS}.llama_eagle3:Eagle3LlamaForCausalLM", "3e510a16bd7acd4f"), _read_eagle3),
    Method(_target(f"{_MODELS}.qwen3_eagle3:Eagle3Qwen3ForCausalLM", "4adce98c116fc9d3"), _read_eagle3),
    Method(_target(f"{_MODELS}.deepseek_eagle3:Eagle3DeepseekV2ForCausalLM", "99f2e625f0920c25"), _read_eagle3),
    Method(_target(f"{_MODELS}.qwen3_dflash:DFlashQwen3ForCausalLM", "ac93e9250a6bc14d"), _read_dflash),
    Method(_target(f"{_MODELS}.laguna_dflash:DFlashLagunaForCausalLM", "fa59dbe9900fdfb6"), _read_laguna),
    Method(
        _target("vllm.models.beam.nvidia.dflash2:DFlash2BeamForCausalLM", "8d2545968e936c1f", ONLY_033), _read_dflash
    ),
    *map(_deepseek_v4, ("deepseek_v4.nvidia", "deepseek_v4.xpu", "deepseek_v41.nvidia")),
    Method(
        _target(f"{_K3}ForCausalLM", "2ee024dd3bf5ad48"),
        _read_kimi_k3,
        "context_proj",
        _target(f"{_K3}Model", "7f95d5d3fe5fdbba"),
    ),
)
TARGETS = tuple(target for method in METHODS for target in method.targets)


def _state_num_chunks(config: Any) -> None:
    """Set K in the config. vLLM's Llama and DeepSeek drafters size fc for 3 chunks where only the top-level layer ids
    give K, as in the speculators format, and fail on any other K (vllm#54526; vllm#54598 is not merged)."""
    nested = getattr(config, "eagle_config", None) or {}
    layer_ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    stated = getattr(config, "num_aux_hidden_states", None) or nested.get("eagle_aux_hidden_state_layer_ids")
    if layer_ids and not stated:
        config.num_aux_hidden_states = len(layer_ids)


def _keep_dense_on_cpu(drafter: Any) -> None:
    """Keep fc's weight dense until `_timed`, where the fused op may read it; else vLLM packs it as usual."""
    from vllm.distributed import get_tp_group
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or not is_on("combine"):
        return
    projection, _ = _read(drafter)
    if projection is None or projection.fc_unsupported is not None:
        return
    if not projection.is_worthwhile and not (is_on("row_parallel") and get_tp_group().world_size > 1):
        return
    # Packing changes a bias in place, so the two layouts could not exist side by side.
    if getattr(projection.fc, "bias", None) is None:
        with contextlib.suppress(ProbeError):  # raised again in `_timed`, where it is logged
            check_backend(projection.op, torch.device("cpu"))
            cpu_packing.keep_dense(projection.fc)


def _fused_kernel_reads(fc: Any) -> bool:
    """Whether it is chosen at 32 rows: a few requests of a few draft tokens each."""
    problem = Problem("norm_concat_linear", torch.device("cpu"), rows=32, dtype=fc.params_dtype)
    return choose(*problem).is_one_pass
