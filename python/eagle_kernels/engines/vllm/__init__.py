"""The vLLM plugin: entry point `vllm.general_plugins`, run by vLLM in every process before a model is built.

Nothing of vLLM is imported until `register` runs, no model before vLLM itself loads it, and no failure here reaches the
engine: a part that cannot be applied is logged with the name of its target, and vLLM runs its own code.

| part (EAGLE_KERNELS_VLLM_<PART>) | default | replaces |
|---|---|---|
| combine | on | norms + cat + fc (+ norm), or fc + norm: `combine_hidden_states` of EAGLE-3, Laguna DFlash, DSpark |
| zero_copy | on | the same, with the cat before and the copy after it, in the V2 speculators of EAGLE-3 and DFlash |
| mtp | on | enorm + hnorm + eh_proj of 28 MTP families and two EAGLE-1 drafters, norm + projection of two more |
| layer0 | on | input_layernorm + hidden_norm + cat + qkv_proj of layer 0 of EAGLE-3 drafters |
| context | on | hidden_norm (Laguna: each layer's) + K, V of all layers + K's norm, RoPE of DFlash, DSpark |
| scales | on | a quantized drafter's weights dequantized where vLLM's layer would read codes as dense weights |
| embedding | off | masks and gather of VocabParallelEmbedding where vLLM has no fused op for them (all but CUDA) |

EAGLE_KERNELS_VLLM=0 turns all of it off; =force runs the ops even where vLLM's own code is faster (docs/vllm.md).
"""

import logging

from ... import environment
from ...version import __version__
from ..eligibility import log_once
from ..gates import Target, TargetError

PARTS = {
    "combine": True,
    "zero_copy": True,
    "mtp": True,
    "layer0": True,
    "context": True,
    "scales": True,
    "embedding": False,
}
# row_parallel: the projections of combine, zero_copy and mtp split by columns over the ranks that replicate them.
OPTIONS = {"row_parallel": False}
TESTED_VERSIONS = ("0.32.0", "0.33.0")  # the gates know their bodies; a later version may have the same ones
LOGGER = logging.getLogger("vllm.eagle_kernels")  # below "vllm", so that vLLM's handlers print it
# The key of vLLM's compile caches has the value of every variable that vLLM knows, except for a list of names.
VARIABLES = Target("vllm.envs:environment_variables")
FACTORS = Target("vllm.envs:compile_factors", ())
_KEY = "EAGLE_KERNELS_VLLM"


def register() -> None:
    """vLLM calls this once per process, other code may call it again: the second time changes nothing."""
    try:
        _register()
    except Exception as failure:  # a plugin's exception would end the engine's process
        log_once(LOGGER, logging.WARNING, f"the plugin is off, it failed to register: {failure!r}")


def _register() -> None:
    switches = environment.engine_switches("vllm", PARTS | OPTIONS)
    for sentence in switches.wrong:
        log_once(LOGGER, logging.WARNING, sentence)
    if not switches.parts:
        return
    from . import combine, context, embedding, layer0, mtp, normed_linear, registry, scales
    from .registry import leaving_to_vllm

    registry.switches = switches
    if switches.parts & {"combine", "zero_copy"}:
        with leaving_to_vllm("combine_hidden_states"):
            combine.register()
    if "context" in switches.parts:
        with leaving_to_vllm("K and V of DFlash drafters"):
            context.register()
    # mtp, layer0 and embedding are inside of what vLLM compiles and caches.
    if "mtp" in switches.parts:
        with leaving_to_vllm("the input stage of MTP layers"):
            _tell_compile_cache(switches.parts, normed_linear.fused)
            mtp.register()
    if "layer0" in switches.parts:
        with leaving_to_vllm("layer 0 of EAGLE-3 drafters"):
            _tell_compile_cache(switches.parts, normed_linear.fused)
            layer0.register()
    if "scales" in switches.parts:
        with leaving_to_vllm("the scales of quantized drafters"):
            scales.register()
    if "embedding" in switches.parts:
        with leaving_to_vllm(embedding.NAME):
            _tell_compile_cache(switches.parts, normed_linear.fused)
            embedding.register()


def _tell_compile_cache(parts: frozenset[str], fused: set[str]) -> None:
    """Make the plugin part of the key of vLLM's compile caches, as if it were one of vLLM's own variables.

    An AOT artifact is found by environment, config and the name of the compiled forward, none of which this plugin
    changes: a graph cached without the plugin would run with it, and the other way round.
    """

    def value() -> str:
        return ",".join((__version__, *sorted(parts), *sorted(fused)))

    VARIABLES.find()[2][_KEY] = value
    if FACTORS.find()[2]().get(_KEY) != value():
        raise TargetError(f"{FACTORS.where} leaves {_KEY} out of the key of the compile caches")
