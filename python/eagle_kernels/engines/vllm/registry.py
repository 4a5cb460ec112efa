"""How a hook gets between vLLM's model registry and a model class, without importing the model before vLLM does."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..eligibility import log_once
from ..gates import Target, TargetError
from ..projection import ProbeError
from . import LOGGER


@contextlib.contextmanager
def leaving_to_vllm(target: str) -> Iterator[None]:
    """Whatever fails inside is logged with the name of its target, and goes no further: vLLM runs its own code."""
    try:
        yield
    except Exception as failure:
        because = failure if isinstance(failure, TargetError | ProbeError) else repr(failure)
        log_once(LOGGER, logging.WARNING, f"{target} stays with vLLM: {because}")


MODELS = Target("vllm.model_executor.models.registry:ModelRegistry.models")


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
    missing = [architecture for architecture in architectures if architecture not in models]
    if missing:
        message = f"{', '.join(missing)} are not in vLLM's registry, and stay untouched"
        log_once(LOGGER, logging.WARNING, message)
    for architecture in architectures:
        entry = models.get(architecture)
        if entry is not None and not _is_hooked(entry, hook):
            models[architecture] = HookedModel(entry, hook)


def _is_hooked(entry: Any, hook: Callable) -> bool:
    return isinstance(entry, HookedModel) and (entry.hook is hook or _is_hooked(entry.entry, hook))
