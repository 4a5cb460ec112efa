"""The SGLang plugin: entry point `sglang.srt.plugins`, run by SGLang in every process before a model is built.

No module of SGLang is imported: each hook goes in when SGLang imports its target (`hooks`). No failure here reaches the
engine: if one of a part's targets is gone or is not what was recorded, the whole part stays off, one warning names the
target, and SGLang runs its own code.

| part (EAGLE_KERNELS_SGLANG_<PART>) | default | does |
|---|---|---|
| projection | on | norms + fc of EAGLE-3 drafters (`llama_eagle3`, `kimi_k25_eagle3`) in one op, also if K*Ht == Hd |
| mtp | on | enorm + hnorm + cat + eh_proj of 26 families' MTP layers in one op; norm + projection of two more |
| layer0 | on | input_layernorm + hidden_norm + cat + qkv_proj of layer 0 of EAGLE-3 drafters in one op |
| context | on | fc + hidden_norm of DFlash and DSpark drafters, with Laguna's norms in front, in one op |
| vocab | on | a Gemma target's table sharded as its drafter pads it, where SGLang slices by ceil(V / tp) |
| gemma3_capture | on | hidden + residual from Gemma 3's captured layers, where SGLang drops the residual |
| capture | on | captured layers straight into one packed tensor, the decode graphs' static one under CUDA graphs |
| scales | on | a quantized drafter's weights dequantized where SGLang's layer would read codes as dense weights |

EAGLE_KERNELS_SGLANG=0 turns all of it off. Conventions: SGLang 0.5.23; docs/sglang.md says what happens in other
versions.
"""

import importlib
import logging

from ... import environment
from ..eligibility import log_once
from . import stage
from .hooks import LOGGER, Hook, hook_all

# One module per part; its HOOKS are what the part touches.
PARTS = dict.fromkeys(("projection", "mtp", "layer0", "context", "vocab", "gemma3_capture", "capture", "scales"), True)
# row_parallel: replicated projections of `projection`, `mtp`, `layer0` and `context` split by columns over the ranks.
OPTIONS = {"row_parallel": False}
TESTED_VERSIONS = ("0.5.23",)


def register() -> None:
    """SGLang calls this once per process, other code may call it again: the second time changes nothing."""
    try:
        _register()
    except Exception as failure:  # SGLang would catch it as well; the message is ours
        log_once(LOGGER, logging.WARNING, f"the plugin is off, it failed to register: {failure!r}")


def _register() -> None:
    switches = environment.engine_switches("sglang", PARTS | OPTIONS)
    for sentence in switches.wrong:
        log_once(LOGGER, logging.WARNING, sentence)
    stage.force, stage.row_parallel = switches.force, "row_parallel" in switches.parts
    hook_all({part: _hooks(part) for part in PARTS if part in switches.parts})


def _hooks(part: str) -> tuple[Hook, ...]:
    return importlib.import_module(f".{part}", __name__).HOOKS
