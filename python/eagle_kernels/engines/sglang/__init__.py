"""The SGLang plugin: entry point `sglang.srt.plugins`, run by SGLang in every process before a model is built.

Nothing of SGLang is imported until `register` runs, every hook goes through SGLang's own HookRegistry, and no failure
here reaches the engine: a part one of whose targets is gone stays off as a whole, with one warning that names the
target, and SGLang runs its own code.

| part (EAGLE_KERNELS_SGLANG_<PART>) | default | does |
|---|---|---|
| projection | on | norms + fc of EAGLE-3 drafters (`llama_eagle3`, `kimi_k25_eagle3`) in one op, K*Ht == Hd too |
| mtp | on | enorm + hnorm + cat + eh_proj of the Step-3.5 and Qwen3-Next MTP layers in one op |
| vocab | on | a Gemma target's table cut as its drafter pads it, where SGLang slices by ceil(V / tp) |
| gemma3_capture | on | hidden + residual from Gemma 3's captured layers, where SGLang drops the residual |
| capture | on | captured layers straight into one packed tensor, the decode graphs' static one under CUDA graphs |

EAGLE_KERNELS_SGLANG=0 turns all of it off. Conventions: SGLang 0.5.23 (docs/sglang.md).
"""

import importlib
import logging

from ... import environment
from ..eligibility import log_once, version_unsupported_reason
from .hooks import LOGGER, Hook, hook_all

# Each part's module, in which HOOKS says what it touches.
PARTS = {"projection": True, "mtp": True, "vocab": True, "gemma3_capture": True, "capture": True}
FIRST_VERSION, LAST_VERSION = "0.5.23", "0.5.23"


def register() -> None:
    """SGLang calls this once per process, other code may call it again: the second time changes nothing."""
    try:
        _register()
    except Exception as failure:  # SGLang would catch it as well; the sentence is ours
        log_once(LOGGER, logging.WARNING, f"the plugin is off, it failed to register: {failure!r}")


def _register() -> None:
    parts = environment.engine_parts("sglang", PARTS)
    if not parts:
        return
    import sglang

    unsupported = version_unsupported_reason("SGLang", sglang.__version__, FIRST_VERSION, LAST_VERSION)
    if unsupported is not None:
        log_once(LOGGER, logging.WARNING, f"the plugin is off: {unsupported}")
        return
    hook_all({part: _hooks(part) for part in PARTS if part in parts})


def _hooks(part: str) -> tuple[Hook, ...]:
    return importlib.import_module(f".{part}", __name__).HOOKS
