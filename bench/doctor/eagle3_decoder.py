"""An EAGLE-3 drafter's decoder layers: how many there are, and q, k, v and the biases of the first one's attention.

What engines do is taken from SGLang 0.5.23 (`llama_eagle3`, `kimi_k25_eagle3`, `llama`) and vLLM 0.33 (`llama_eagle3`,
`qwen3_eagle3`, `deepseek_eagle3`, `llama`).
"""

import re
from collections.abc import Mapping
from functools import partial

import torch

from eagle_kernels.checkpoint import eagle3_qkv_projection
from eagle_kernels.checkpoint_files import Checkpoint
from eagle_kernels.drafter_config import first_field
from eagle_kernels.eagle3_qkv_projection import Eagle3QKVConfig, Eagle3QKVProjection

from .pair import SGLANG, VLLM_V1, VLLM_V2, Header, Pair
from .quantization import holds_codes

_LAYER = re.compile(r"(?:model\.)?(?:midlayer|layers\.(?P<number>\d{1,9}))\.(?P<rest>.+)")
# vLLM builds o_proj of these without a bias whatever the config says.
_WITHOUT_OUTPUT_BIAS = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM")


def examine(pair: Pair, is_mla: bool) -> None:
    """Compare the decoder layers of the file with the config, as far as that says anything of them.

    Args:
        is_mla: whether the drafter's attention is latent.
    """
    section = pair.drafter.get("transformer_layer_config")
    layer = section if isinstance(section, Mapping) else pair.drafter
    of_speculators = pair.drafter.get("speculators_model_type") is not None  # whose configs SGLang does not read
    _look_at_number(pair, first_field("num_hidden_layers", layer), is_mla, of_speculators)
    if layer.get("num_attention_heads") is None:  # an engine's default is that of the config's class
        return
    if is_mla and layer.get("q_lora_rank") is None:
        return pair.find("config", "requires q_lora_rank, which the config does not have, and fails", SGLANG)
    try:
        config = Eagle3QKVConfig.from_hf(pair.drafter)
    except (TypeError, ValueError) as wrong:
        return pair.find("config", str(wrong))
    _look_at_attention(pair, config)
    if config.bias and not of_speculators:
        text = "takes attention_bias for False, and the drafter was trained with True: q, k and v lose their biases"
        pair.find("engine-flags", text, SGLANG)
    if not is_mla:
        _look_at_output_bias(pair, layer)


def _look_at_number(pair: Pair, stated: object, is_mla: bool, of_speculators: bool) -> None:
    if type(stated) is not int or stated < 1:
        return
    found = {int(match["number"] or 0) for match in map(_LAYER.fullmatch, pair.headers) if match}
    known = {number for number in found if number < stated}
    said = f"num_hidden_layers is {stated}, and the file has the layers {sorted(found)}"
    if is_mla and stated != 1 and not of_speculators:
        pair.find("decoder-layers", f"num_hidden_layers is {stated}, and it has one layer: it fails", SGLANG)
    sglang = () if is_mla or of_speculators else (SGLANG,)
    if len(known) < stated:
        text = f"{said}: it runs the others with what its memory had, and says nothing"
        pair.find("decoder-layers", text, *sglang, VLLM_V1, VLLM_V2)
    if known != found:
        pair.find("decoder-layers", f"{said}: it fails to load the others", VLLM_V1, VLLM_V2)
        if sglang:
            pair.find("decoder-layers", f"{said}: it skips the others, and says nothing", *sglang)


def _look_at_attention(pair: Pair, config: Eagle3QKVConfig) -> None:
    """Run the package's own loader on q, k and v of layer 0. Norms and codes, which others look at, get stand-ins."""
    # Each rank's loader looks at the whole weights, and copies its own rows: those of one head are the fewest.
    tp_size = 1 if config.latent else config.num_heads
    try:
        layer = Eagle3QKVProjection(config, tp_size=tp_size, dtype=torch.bfloat16, device="meta")
    except (TypeError, ValueError) as wrong:
        return pair.find("config", str(wrong))
    H, prefix = config.hidden_size, _prefix(pair)
    readers = {f"{prefix}{norm}.weight": Header((H,), "BF16").stand_in for norm in ("input_layernorm", "hidden_norm")}
    for name, (_, rows) in layer.all_rows.items():
        path = f"{prefix}self_attn.{name}"
        names = [f"{path}.{parameter}" for parameter in pair.layers.get(path, {})]
        if holds_codes(pair, path):
            readers[f"{path}.weight"] = Header((rows, 2 * H), "BF16").stand_in
            names = [other for other in names if other.endswith(".bias")]
        readers |= pair.readers(names)
    pair.look_at_loading(partial(eagle3_qkv_projection, Checkpoint(readers, pair.quantization), layer))


def _look_at_output_bias(pair: Pair, layer: Mapping[str, object]) -> None:
    """vLLM's o_proj has a bias for attention_bias and for bias, which means fc's, and no check that the file has it."""
    names = pair.architectures
    is_qwen3 = any(name in _WITHOUT_OUTPUT_BIAS for name in names) or (not names and layer.get("model_type") == "qwen3")
    said = next((field for field in ("attention_bias", "bias") if first_field(field, pair.drafter, layer)), None)
    stored = {match["rest"] for match in map(_LAYER.fullmatch, pair.headers) if match}
    if said is not None and not is_qwen3 and "self_attn.o_proj.bias" not in stored:
        text = f"builds o_proj with a bias, as {said} says, and the file has none: it adds what its memory had"
        pair.find("engine-flags", text, VLLM_V1, VLLM_V2)


def _prefix(pair: Pair) -> str:
    """What the names of layer 0 begin with."""
    of_layer_0 = ((name, match) for name in pair.headers if (match := _LAYER.fullmatch(name)))
    return next(
        (name.removesuffix(match["rest"]) for name, match in of_layer_0 if not int(match["number"] or 0)), "midlayer."
    )
