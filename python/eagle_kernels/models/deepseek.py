"""DeepSeek V3 and Kimi K2: plain gains, unscaled embeddings, EAGLE-3 ids in two encodings.

SpecForge's DeepSeek drafters say [1, 29, 57] and its Kimi drafters [2, 30, 58] for the same boundaries: both engines'
`deepseek_v2.py` shifts by one iff the first id is 1 (sglang#25454).

MTP: SGLang 0.5.23 `deepseek_nextn.py` and vLLM 0.33 `deepseek_mtp.py`, which alone zeroes the embedding at position 0
(contested: vllm#33299, vllm#49938). Kimi K2's checkpoints hold no MTP layers.
"""

from .family import ModelFamily, MTPStage

DEEPSEEK_V3 = ModelFamily(
    name="deepseek_v3",
    model_types=("deepseek_v3", "deepseek_v32"),
    layer_ids="output-iff-first-is-1",
    mtp=MTPStage(position_0_zeroed_by=("vllm",)),
    shapes=(
        {
            "name": "deepseek-v3",
            "target_hidden_size": 7168,
            "num_layers": 61,
            "vocab_size": 129280,
            "rms_norm_eps": 1e-6,
            "eagle3": {
                "num_chunks": 3,
                "draft_hidden_size": 7168,
                "layer_ids": [1, 29, 57],
                "boundaries": [2, 30, 58],
                "draft_vocab_size": 32000,
            },
            "mtp": {"num_chunks": 2, "layers": 1},
        },
    ),
)

KIMI_K2 = ModelFamily(
    name="kimi_k2",
    model_types=("kimi_k2", "kimi_k25"),
    layer_ids="output-iff-first-is-1",
    shapes=(
        {
            "name": "kimi-k2.5",
            "target_hidden_size": 7168,
            "num_layers": 61,
            "vocab_size": 163840,
            "rms_norm_eps": 1e-6,
            "eagle3": {
                "num_chunks": 3,
                "draft_hidden_size": 7168,
                "layer_ids": [2, 30, 58],
                "boundaries": [2, 30, 58],
                "draft_vocab_size": 32000,
                "fc_sharded_over_tp": True,
            },
        },
        {
            "name": "kimi-k2.7-dflash",
            "target_hidden_size": 7168,
            "num_layers": 61,
            "vocab_size": 163840,
            "rms_norm_eps": 1e-5,
            "dflash": {"num_chunks": 6, "layer_ids": [1, 12, 24, 35, 47, 58]},
        },
    ),
)

FAMILIES = (DEEPSEEK_V3, KIMI_K2)
