"""The vLLM plugin: entry point `vllm.general_plugins`, run by vLLM in every process before a model is built.

Nothing of vLLM is imported until `register` runs, no model before vLLM itself loads it, and no failure here reaches the
engine: a part that cannot be applied is logged with the name of its target, and vLLM runs its own code.

| part (EAGLE_KERNELS_VLLM_<PART>) | default | replaces |
|---|---|---|
| combine | on | cat of norms + fc in `combine_hidden_states` of EAGLE-3, Laguna DFlash |
| zero_copy | on | the same, with the cat before and the copy behind it, in the V2 speculators of EAGLE-3 and DFlash |
| mtp | on | enorm + hnorm + eh_proj of DeepSeek and Step-3.5 |
| embedding | off | masks and gather of VocabParallelEmbedding where vLLM has no fused op for them (all but CUDA) |

EAGLE_KERNELS_VLLM=0 turns all of it off. Conventions: vLLM 0.32 and 0.33 (docs/vllm.md).
"""

import logging

from ... import environment
from ...version import __version__
from ..eligibility import log_once, version_unsupported_reason

PARTS = {"combine": True, "zero_copy": True, "mtp": True, "embedding": False}
FIRST_VERSION, LAST_VERSION = "0.32", "0.33"
LOGGER = logging.getLogger("vllm.eagle_kernels")  # below "vllm", so that vLLM's handlers print it


def register() -> None:
    """vLLM calls this once per process, other code may call it again: the second time changes nothing."""
    try:
        _register()
    except Exception as failure:  # a plugin's exception would end the engine's process
        log_once(LOGGER, logging.WARNING, f"the plugin is off, it failed to register: {failure!r}")


def _register() -> None:
    parts = environment.engine_parts("vllm", PARTS)
    if not parts:
        return
    import vllm

    unsupported = version_unsupported_reason("vLLM", vllm.__version__, FIRST_VERSION, LAST_VERSION)
    if unsupported is not None:
        log_once(LOGGER, logging.WARNING, f"the plugin is off: {unsupported}")
        return
    _tell_compile_cache(parts)
    if parts & {"combine", "zero_copy"}:
        from . import combine

        combine.register(parts)
    if "mtp" in parts:
        from . import mtp

        mtp.register()
    if "embedding" in parts:
        from . import embedding

        embedding.register()


def _tell_compile_cache(parts: frozenset[str]) -> None:
    """Make the plugin part of the key of vLLM's compile caches, as if it were one of vLLM's own variables.

    An AOT artifact is found by environment, config and the name of the compiled forward, none of which this plugin
    changes: a graph cached without the plugin would run with it, and the other way round.
    """
    import vllm.envs

    value = ",".join((__version__, *sorted(parts)))
    vllm.envs.environment_variables["EAGLE_KERNELS_VLLM"] = lambda: value
