"""How a hook gets between vLLM's model registry and a model class, without importing the model before vLLM does."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ...environment import EngineSwitches
from ..eligibility import log_once
from ..gates import Target
from ..projection import leaving_to
from . import LOGGER

# What the environment asked of the plugin, for all of its hooks; set before they are put in.
switches = EngineSwitches(frozenset(), False, ())

leaving_to_vllm = functools.partial(leaving_to, "vLLM", LOGGER)


def is_on(part: str) -> bool:
    return part in switches.parts


def batch_invariant_reason() -> str | None:
    """Why all stages stay with vLLM where results are not to depend on the batch; None where they may."""
    import vllm.envs

    return "VLLM_BATCH_INVARIANT=1 wants vLLM's own batch-invariant kernels" if vllm.envs.VLLM_BATCH_INVARIANT else None


# The versions in which a hooked body is the same.
ONLY_032, ONLY_033 = ("0.32.0",), ("0.33.0",)
BOTH = ONLY_032 + ONLY_033
MODELS = Target("vllm.model_executor.models.registry:ModelRegistry.models")
# In 0.33 alone.
NEW_ARCHITECTURES = frozenset(
    {"Qwen3XPressModel", "DFlashQwen3XPressModel", "DFlash2BeamDraftModel", "MuseSparkDSparkModel", "Step5MTP"}
)


@dataclass(frozen=True)
class HookedModel:
    """A registry entry that loads what `entry` loads, through a hook; what vLLM asks about the class is unchanged."""

    entry: Any
    hook: Callable[[type[nn.Module]], type[nn.Module]]

    def __getattr__(self, name: str) -> object:
        if name == "entry":  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.entry, name)

    def load_model_cls(self) -> type[nn.Module]:
        model_class = self.entry.load_model_cls()
        with leaving_to_vllm(f"{model_class.__module__}.{model_class.__qualname__}"):
            return self.hook(model_class)
        return model_class


def hook_models(architectures: Sequence[str], hook: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Put `hook` in front of every architecture that is registered; another plugin's entry is hooked like vLLM's own,
    and an entry that a plugin registers later replaces this one."""
    models = MODELS.find()[2]
    missing = [architecture for architecture in architectures if architecture not in models.keys() | NEW_ARCHITECTURES]
    if missing:
        message = f"{', '.join(missing)} are not in vLLM's registry, and stay untouched"
        log_once(LOGGER, logging.WARNING, message)
    for architecture in architectures:
        entry = models.get(architecture)
        if entry is not None and not _is_hooked(entry, hook):
            models[architecture] = HookedModel(entry, hook)


@dataclass(frozen=True)
class Config:
    """What hooks read of a VllmConfig and of the model that is built with it.

    max_rows: the max rows of a forward.  compiled: whether vLLM compiles the model.  lora: whether adapters may replace
        layers.
    """

    max_rows: int
    compiled: bool
    lora: bool

    @classmethod
    def of(cls, config: Any, model: nn.Module) -> "Config":
        # Classes that vLLM compiles have the flag; most MTP models have other classes, and run eagerly in any mode.
        compiled = any(not getattr(module, "do_not_compile", True) for module in model.modules())
        lora = getattr(config, "lora_config", None) is not None
        return cls(config.scheduler_config.max_num_batched_tokens, compiled, lora)


State = TypeVar("State")


def when_loaded(
    model: type[nn.Module],
    stage: str,
    read: Callable[[Any, Config], State | None],
    fuse: Callable[[Any, State], None],
) -> type[nn.Module]:
    """A subclass of a model that fuses a stage once its weights are there, before a forward is traced.

    Args:
        stage: its name in logs.
        read: is given the model once it is built; what it returns goes to `fuse`, unless that is None.
    """
    where, module = f"{model.__name__}'s {stage}", fuse.__module__

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        model.__init__(self, vllm_config=vllm_config, prefix=prefix)
        with leaving_to_vllm(where):
            self.__dict__[module] = read(self, Config.of(vllm_config, self))

    def process_weights_after_loading(self: Any) -> None:
        """vLLM's hook on a model, after `load_weights` and after its layers' weights are processed."""
        if hasattr(model, "process_weights_after_loading"):
            model.process_weights_after_loading(self)
        state = self.__dict__.pop(module, None)  # once: what is fused must not be fused again
        if state is not None:
            with leaving_to_vllm(where):
                fuse(self, state)

    members = {"__init__": __init__, "process_weights_after_loading": process_weights_after_loading}
    return type(model.__name__, (model,), {**members, "__module__": module})


def _is_hooked(entry: Any, hook: Callable) -> bool:
    return isinstance(entry, HookedModel) and (entry.hook is hook or _is_hooked(entry.entry, hook))
