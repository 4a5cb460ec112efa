"""Gemma 3 and Gemma 4: embeddings times sqrt(H); gains 1 + w in Gemma 3 and w in Gemma 4.

The scale is rounded differently from place to place: transformers 5 `Gemma3TextScaledWordEmbedding` and vLLM 0.33
`gemma3.py` multiply by sqrt(H) rounded to the table's dtype, SGLang 0.5.23 `gemma3_causal.py` by the Python float. An
EAGLE-3 drafter reads the raw table in each of them.

Layer ids: output ids, SGLang 0.5.23 `gemma3_causal.py` / `gemma4_causal.py` `set_eagle3_layers_to_capture`.
"""

from .family import ModelFamily, MTPStage

GEMMA3 = ModelFamily(
    name="gemma3",
    model_types=("gemma3", "gemma3_text"),
    norm_offset=1.0,  # Gemma3RMSNorm: weights start at 0
    embedding_scaled=True,
    scale_rounded_by=("transformers", "vllm"),
    layer_ids="output",
    shapes=(
        {
            "name": "gemma3-1b",
            "target_hidden_size": 1152,
            "num_layers": 26,
            "vocab_size": 262144,
            "rms_norm_eps": 1e-6,
            "eagle3": {"num_chunks": 3, "draft_hidden_size": 1152, "draft_vocab_size": 32000},
            "certain": False,
        },
        {
            "name": "gemma3-4b",
            "target_hidden_size": 2560,
            "num_layers": 34,
            "vocab_size": 262208,
            "rms_norm_eps": 1e-6,
            "eagle3": {"num_chunks": 3, "draft_hidden_size": 2560},
        },
        {
            "name": "gemma3-12b",
            "target_hidden_size": 3840,
            "num_layers": 48,
            "vocab_size": 262208,
            "rms_norm_eps": 1e-6,
            "eagle3": {"num_chunks": 3, "draft_hidden_size": 3840},
            "certain": False,
        },
        {
            "name": "gemma3-27b",
            "target_hidden_size": 5376,
            "num_layers": 62,
            "vocab_size": 262208,
            "rms_norm_eps": 1e-6,
            "eagle3": {
                "num_chunks": 3,
                "draft_hidden_size": 5376,
                "layer_ids": [1, 29, 61],
                "boundaries": [2, 30, 62],
                "draft_vocab_size": 262208,
            },
        },
    ),
)

GEMMA4 = ModelFamily(
    name="gemma4",
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    norm_offset=0.0,  # Gemma4RMSNorm: SGLang's scale_shift=0, vLLM's plain RMSNorm
    embedding_scaled=True,
    scale_rounded_by=("transformers", "vllm"),
    layer_ids="output",
    # The assistant: pre_projection(cat[embedding * sqrt(backbone H), hidden]); SGLang 0.5.23 and vLLM 0.33 gemma4_mtp.
    mtp=MTPStage(normed=False, embedding_scaled=True, drafter_types=("gemma4_assistant", "gemma4_unified_assistant")),
    shapes=(
        {
            "name": "gemma4-26b-a4b",
            "target_hidden_size": 2816,
            "num_layers": 30,
            "vocab_size": 262144,
            "rms_norm_eps": 1e-6,
            "eagle3": {
                "num_chunks": 3,
                "draft_hidden_size": 2816,
                "layer_ids": [5, 17, 29],
                "boundaries": [6, 18, 30],
                "draft_vocab_size": 262144,
            },
        },
        {
            "name": "gemma4-31b",
            "target_hidden_size": 5376,
            "num_layers": 60,
            "vocab_size": 262144,
            "rms_norm_eps": 1e-6,
            "dflash": {"num_chunks": 6, "layer_ids": [1, 12, 23, 35, 46, 57]},
            "eagle3": {"num_chunks": 3, "draft_hidden_size": 5376},
        },
    ),
)

FAMILIES = (GEMMA3, GEMMA4)
