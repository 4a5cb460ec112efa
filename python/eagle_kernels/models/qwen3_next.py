"""Qwen3-Next: gains 1 + w in the target and its MTP layer, whose three weights have names of their own.

`pre_fc_norm_embedding`, `pre_fc_norm_hidden` and `fc` are enorm, hnorm and eh_proj: SGLang 0.5.23 and vLLM 0.33
`qwen3_next_mtp.py`; neither zeroes position 0. Layer ids: output ids, SGLang `qwen3_next.py`.
"""

from .family import ModelFamily, MTPStage

QWEN3_NEXT = ModelFamily(
    name="qwen3_next",
    model_types=("qwen3_next",),
    norm_offset=1.0,
    layer_ids="output",
    mtp=MTPStage(),
    shapes=(
        {
            "name": "qwen3-next-80b",
            "target_hidden_size": 2048,
            "num_layers": 48,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "mtp": {"num_chunks": 2, "layers": 1},
        },
    ),
)

FAMILIES = (QWEN3_NEXT,)
