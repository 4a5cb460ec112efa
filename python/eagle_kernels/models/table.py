"""Every family, one row each, as SGLang 0.5.23 and vLLM 0.33 compute it.

Gemma: transformers 5 `Gemma3TextScaledWordEmbedding` and vLLM `gemma3.py` multiply embeddings by sqrt(H) rounded to the
table's dtype, SGLang `gemma3_causal.py` by the Python float; an EAGLE-3 drafter reads the raw table in each of them.

DeepSeek and Kimi K2: SpecForge's DeepSeek drafters say [1, 29, 57] and its Kimi drafters [2, 30, 58] for the same
boundaries; both engines' `deepseek_v2.py` shift by one iff the first id is 1 (sglang#25454).

Position 0: vLLM zeroes the embedding where the code is modeled on its DeepSeek code (contested: vllm#33299,
vllm#49938). MiMo and Ernie were trained with it, and both engines do it.

Chain: GLM-4 feeds a draft step with the pre-norm state in vLLM and the normed one in SGLang, Mistral's EAGLE the other
way round: one checkpoint, two inputs from step 2 on. Step-3.5 and GigaChat 3.5 have a layer per step in SGLang, each
reading the one before; MiMo-V2's read the target's state.

`layer_ids`: SGLang `set_eagle3_layers_to_capture` of the model's class.
"""

from .family import EngineStage, ModelFamily, MTPStage

_QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")
_ZERO_CENTERED = 1.0  # gains of 1 + w: weights start at 0


def _deepseek(sglang: str, vllm: str, compiled: bool) -> MTPStage:
    return MTPStage(
        sglang=EngineStage((sglang,)),
        vllm=EngineStage((vllm,), zeroes_position_0=True, compiled=compiled),
    )


FAMILIES = (
    ModelFamily(
        name="gemma3",
        title="Gemma 3",
        model_types=("gemma3", "gemma3_text"),
        norm_offset=_ZERO_CENTERED,
        embedding_scaled=True,
        scale_rounded_by=("transformers", "vllm"),
        layer_ids="output",
    ),
    ModelFamily(
        name="gemma4",
        title="Gemma 4 assistant",
        model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        norm_offset=0.0,  # Gemma4RMSNorm: SGLang's scale_shift=0, vLLM's plain RMSNorm
        embedding_scaled=True,
        scale_rounded_by=("transformers", "vllm"),
        layer_ids="output",
        mtp=MTPStage(
            normed=False,
            names=("pre_projection",),
            embedding_scaled=True,
            drafter_types=("gemma4_assistant", "gemma4_unified_assistant"),
            sglang=EngineStage(
                ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
                "ReplicatedLinear",
                "projected",
                quantized=True,
            ),
            vllm=EngineStage(("Gemma4MTPModel",), "ColumnParallelLinear", "projected", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="deepseek_v3",
        title="DeepSeek V3, R1",
        model_types=("deepseek_v3",),
        layer_ids="output-iff-first-is-1",
        mtp=_deepseek("DeepseekV3ForCausalLMNextN", "DeepSeekMTPModel", compiled=True),
    ),
    ModelFamily(
        name="deepseek_v32",
        title="DeepSeek V3.2",
        model_types=("deepseek_v32",),
        layer_ids="output-iff-first-is-1",
        mtp=_deepseek("DeepseekV3ForCausalLMNextN", "DeepseekV32MTPModel", compiled=False),
    ),
    ModelFamily(
        name="glm_moe_dsa",
        title="GLM-5",
        model_types=("glm_moe_dsa",),
        layer_ids="output-iff-first-is-1",
        mtp=_deepseek("GlmMoeDsaForCausalLMNextN", "DeepseekV32MTPModel", compiled=False),
    ),
    ModelFamily(
        name="deepseek_v4",
        title="DeepSeek V4",
        model_types=("deepseek_v4",),
        mtp=MTPStage(
            streams_field="hc_mult",
            names=("enorm", "hnorm", "e_proj", "h_proj"),
            sglang=EngineStage(("DeepseekV4ForCausalLMNextN",), "ReplicatedLinear", "streams", quantized=True),
            vllm=EngineStage(
                ("DeepSeekV4MTPModel",), "ReplicatedLinear", "streams", quantized=True, zeroes_position_0=True
            ),
        ),
    ),
    ModelFamily(
        name="kimi_k2",
        title="Kimi K2",  # its checkpoints hold no MTP layers
        model_types=("kimi_k2", "kimi_k25"),
        layer_ids="output-iff-first-is-1",
    ),
    ModelFamily(
        name="kimi_k3",
        title="Kimi K3",
        model_types=("kimi_k3",),
        mtp=MTPStage(
            vllm=EngineStage(("KimiK3MTPModel",), "ReplicatedLinear", "pre-norm", zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="qwen3_next",
        title="Qwen3-Next",
        model_types=("qwen3_next",),
        norm_offset=_ZERO_CENTERED,
        layer_ids="output",
        mtp=MTPStage(
            names=_QWEN_NAMES,
            sglang=EngineStage(("Qwen3NextForCausalLMMTP",)),
            vllm=EngineStage(("Qwen3NextMTP",), "ColumnParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="qwen3_5",
        title="Qwen3.5",
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        norm_offset=_ZERO_CENTERED,
        layer_ids="output",
        mtp=MTPStage(
            names=_QWEN_NAMES,
            sglang=EngineStage(("Qwen3_5ForCausalLMMTP",)),
            vllm=EngineStage(("Qwen3_5MTP", "Qwen3_5MoeMTP"), "ColumnParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="intern_s2",
        title="InternS2",
        model_types=("intern_s2_preview", "interns2_mobius", "interns2_mobius_text"),
        norm_offset=_ZERO_CENTERED,
        layer_ids="output",
        mtp=MTPStage(
            names=_QWEN_NAMES,
            sglang=EngineStage(("Qwen3_5ForCausalLMMTP",)),
            vllm=EngineStage(
                ("Qwen3_5MTP", "Qwen3_5MoeMTP", "InternS2MobiusMTP"),
                "ColumnParallelLinear",
                quantized=True,
                compiled=True,
            ),
        ),
    ),
    ModelFamily(
        name="qwen4_exp",
        title="Qwen4-Exp",
        model_types=("qwen4_exp", "qwen4_exp_text"),
        norm_offset=_ZERO_CENTERED,
        mtp=MTPStage(  # with hc_count = 1 the stage is Qwen3.5's
            streams_field="hc_count",
            hnorm_over="row",
            names=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden"),
            sglang=EngineStage(("Qwen4ExpForCausalLMMTP",), chain="streams"),
            vllm=EngineStage(("Qwen4ExpMTP",), "ColumnParallelLinear", "streams", quantized=True),
        ),
    ),
    ModelFamily(
        name="qwen3_moe",
        title="Qwen3-MoE",
        model_types=("qwen3_moe",),
        layer_ids="output",
        mtp=MTPStage(names=_QWEN_NAMES, sglang=EngineStage(("Qwen3MoeForCausalLMMTP",))),
    ),
    ModelFamily(
        name="exaone_moe",
        title="EXAONE-MoE",
        model_types=("exaone_moe",),
        layer_ids="output",
        mtp=MTPStage(
            names=_QWEN_NAMES,
            sglang=EngineStage(("ExaoneMoEForCausalLMMTP",)),
            vllm=EngineStage(("ExaoneMoeMTP",), "ColumnParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="exaone4_5",
        title="EXAONE 4.5",
        model_types=("exaone4_5",),
        mtp=MTPStage(
            names=_QWEN_NAMES,
            vllm=EngineStage(("Exaone4_5_MTP",), "ColumnParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="glm4_moe",
        title="GLM-4.5, 4.6, 4.7",
        model_types=("glm4_moe",),
        layer_ids="output",
        mtp=MTPStage(
            sglang=EngineStage(("Glm4MoeForCausalLMNextN",)),
            vllm=EngineStage(("Glm4MoeMTPModel",), chain="pre-norm", zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="glm4_moe_lite",
        title="GLM-4.x Lite",
        model_types=("glm4_moe_lite",),
        layer_ids="output-iff-first-is-1",
        mtp=MTPStage(
            sglang=EngineStage(("Glm4MoeLiteForCausalLMNextN",)),
            vllm=EngineStage(("Glm4MoeLiteMTPModel",), chain="pre-norm", zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="glm_ocr",
        title="GLM-OCR",
        model_types=("glm_ocr", "glm_ocr_text"),
        mtp=MTPStage(
            sglang=EngineStage(("GlmOcrForConditionalGenerationNextN",)),
            vllm=EngineStage(("GlmOcrMTPModel",), chain="pre-norm", zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="glm5_next",
        title="GLM-5-next",
        model_types=("glm5_next", "glm5_next_text"),
        layer_ids="output",
        mtp=_deepseek("Glm5NextForConditionalGenerationNextN", "Glm5NextMTPModel", compiled=False),
    ),
    ModelFamily(
        name="dots3_note",
        title="dots3-note",
        model_types=("dots3_note", "dots3_note_text"),
        mtp=MTPStage(
            sglang=EngineStage(("Dots3NoteForCausalLMNextN",), "ReplicatedLinear", quantized=True),
            vllm=EngineStage(("Dots3NoteMTPModel",), "ReplicatedLinear", quantized=True, zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="pangu_ultra_moe",
        title="openPangu Ultra MoE",
        model_types=("pangu_ultra_moe",),
        mtp=MTPStage(vllm=EngineStage(("OpenPanguMTPModel",), zeroes_position_0=True, compiled=True)),
    ),
    ModelFamily(
        name="mimo",
        title="MiMo",
        model_types=("mimo",),
        mtp=MTPStage(
            order="hidden,embed",
            names=("token_layernorm", "hidden_layernorm", "input_proj"),
            sglang=EngineStage(("MiMoMTP",), zeroes_position_0=True),
            vllm=EngineStage(("MiMoMTPModel",), zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="mimo_v2",
        title="MiMo-V2",
        model_types=("mimo_v2", "mimo_v2_flash"),
        mtp=MTPStage(
            eps_field="layernorm_epsilon",
            sglang=EngineStage(("MiMoV2MTP",), chain="target"),
            vllm=EngineStage(("MiMoV2MTPModel", "MiMoV2OmniMTPModel"), "ReplicatedLinear"),
        ),
    ),
    ModelFamily(
        name="ernie4_5_moe",
        title="Ernie 4.5",
        model_types=("ernie4_5_moe",),
        mtp=MTPStage(
            names=("mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"),
            sglang=EngineStage(
                ("Ernie4_5_MoeForCausalLMMTP",), chain="pre-norm", zeroes_position_0=True, bias="use_bias"
            ),
            vllm=EngineStage(("ErnieMTPModel",), chain="pre-norm", zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="longcat_flash",
        title="LongCat-Flash",
        model_types=("longcat_flash",),
        layer_ids="output",
        mtp=MTPStage(
            sglang=EngineStage(("LongcatFlashForCausalLMNextN",), "ReplicatedLinear", quantized=True),
            vllm=EngineStage(("LongCatFlashMTPModel",), "ReplicatedLinear", quantized=True),
        ),
    ),
    ModelFamily(
        name="nemotron_h",
        title="Nemotron-H",
        model_types=("nemotron_h", "nemotron_h_puzzle"),
        mtp=MTPStage(
            eps_field="layer_norm_epsilon",
            sglang=EngineStage(("NemotronHForCausalLMMTP",), "ColumnParallelLinear", quantized=True),
            vllm=EngineStage(("NemotronHMTPModel",), "ColumnParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="bailing_moe",
        title="Ling 2.5 (Bailing)",
        model_types=("bailing_hybrid", "bailing_moe", "bailing_moe_v2"),
        target_architectures=("BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM"),
        mtp=MTPStage(
            sglang=EngineStage(("BailingMoeForCausalLMNextN",), "ReplicatedLinear", quantized=True),
            vllm=EngineStage(("BailingMoeV25MTPModel",), zeroes_position_0=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="bailing_moe_v3",
        title="Ling 3 (Bailing V3)",
        model_types=("bailing_hybrid", "bailing_moe_v3_vl"),
        target_architectures=("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        mtp=MTPStage(
            sglang=EngineStage(("BailingMoeForCausalLMNextN",), "ReplicatedLinear", quantized=True),
            vllm=EngineStage(("BailingMoeV3MTPModel",), "ReplicatedLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="hy_v3",
        title="HunYuan V3",
        model_types=("hy_v3",),
        mtp=MTPStage(
            sglang=EngineStage(("HYV3ForCausalLMNextN",)),
            vllm=EngineStage(("HYV3MTPModel",), zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="hy_v4",
        title="HunYuan V4",
        model_types=("hy_v4",),
        mtp=MTPStage(
            sglang=EngineStage(("HYV4ForCausalLMNextN",)),
            vllm=EngineStage(("HYV4MTPModel",)),
        ),
    ),
    ModelFamily(
        name="minimax_m3",
        title="MiniMax-M3",
        model_types=("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"),
        norm_offset=_ZERO_CENTERED,
        layer_ids="output",
        mtp=MTPStage(
            drafter_types=("minimax_m3_mtp",),
            vllm=EngineStage(("MiniMaxM3MTP",), "ReplicatedLinear", "pre-norm", quantized=True, zeroes_position_0=True),
        ),
    ),
    ModelFamily(
        name="step3p5",
        title="Step-3.5, 3.7",
        model_types=("step3p5", "step3p7"),
        norm_offset=_ZERO_CENTERED,
        mtp=MTPStage(
            sglang=EngineStage(("Step3p5MTP",), chain="pre-norm"),
            vllm=EngineStage(("Step3p5MTP",), chain="pre-norm"),
        ),
    ),
    ModelFamily(
        name="step5",
        title="Step-5",
        model_types=("step5", "step5_vl"),
        norm_offset=_ZERO_CENTERED,
        mtp=MTPStage(  # fp32 hidden states are rounded before the norm
            norm_offsets=("zero_centered", {None: _ZERO_CENTERED, True: _ZERO_CENTERED, False: 0.0}),
            vllm=EngineStage(("Step5MTP",), chain="pre-norm"),
        ),
    ),
    ModelFamily(
        name="inkling",
        title="Inkling",
        model_types=("inkling_mm_model", "inkling_model", "inkling_text"),
        mtp=MTPStage(
            order="hidden,embed",
            names=("embed_norm", "hidden_norm", "input_proj"),
            embedding_prenormed=True,
            chain_field="chain_hidden_post_norm",
            sglang=EngineStage(("InklingForConditionalGenerationMTP",), chain="pre-norm"),
            vllm=EngineStage(("InklingMTPModel",), "ReplicatedLinear", "pre-norm", quantized=True),
        ),
    ),
    ModelFamily(
        name="gigachat3_5",
        title="GigaChat 3.5",
        model_types=("gigachat3_5",),
        mtp=MTPStage(
            norm_offsets=("norm_type", {"LlamaRMSNorm": 0.0, "ZeroCenteredRMSNorm": _ZERO_CENTERED}),
            sglang=EngineStage(("GigaChat35ForCausalLMNextN",), chain="pre-norm"),
        ),
    ),
    ModelFamily(
        name="iquest_q1",
        title="IQuest-Q1",
        model_types=("iquest_q1",),
        mtp=MTPStage(sglang=EngineStage(("IQuestQ1MTP",)), drafter_types=("iquest_q1_mtp",)),
    ),
    # EAGLE-1: one decoder layer behind the same stage, for any target.
    ModelFamily(
        name="llama_eagle",
        title="Llama, Qwen 2 EAGLE",
        mtp=MTPStage(
            normed=False,
            names=("fc",),
            sglang=EngineStage(("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"), chain="pre-norm", bias=True),
            vllm=EngineStage(("EagleLlamaForCausalLM",), "ReplicatedLinear", "pre-norm", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="llama4_eagle",
        title="Llama 4 EAGLE",
        mtp=MTPStage(normed=False, names=("fc",), vllm=EngineStage(("EagleLlama4ForCausalLM",), compiled=True)),
    ),
    ModelFamily(
        name="cohere_eagle",
        title="Cohere EAGLE",
        mtp=MTPStage(
            normed=False,
            names=("fc",),
            vllm=EngineStage(("EagleCohereForCausalLM",), "ReplicatedLinear", quantized=True, bias=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="minicpm_eagle",
        title="MiniCPM EAGLE",
        mtp=MTPStage(
            names=("input_norm1", "input_norm2", "fc"),
            embedding_scale_field="scale_emb",
            vllm=EngineStage(("EagleMiniCPMForCausalLM",), chain="pre-norm", compiled=True),
        ),
    ),
    ModelFamily(
        name="deepseek_eagle",
        title="DeepSeek EAGLE",
        mtp=MTPStage(names=("enorm", "hnorm", "fc"), vllm=EngineStage(("EagleDeepSeekMTPModel",), compiled=True)),
    ),
    ModelFamily(
        name="mistral_eagle",
        title="Mistral EAGLE",
        mtp=MTPStage(
            normed=False,
            names=("eagle_linear",),
            sglang=EngineStage(("MistralForCausalLMEagle",), "RowParallelLinear", "pre-norm", quantized=True),
            vllm=EngineStage(("EagleMistralForCausalLM",), "RowParallelLinear", quantized=True, compiled=True),
        ),
    ),
    ModelFamily(
        name="mistral_large_3_eagle",
        title="Mistral Large 3 EAGLE",
        mtp=MTPStage(
            normed=False,
            names=("eagle_linear",),
            sglang=EngineStage(("MistralLarge3ForCausalLMEagle",), "RowParallelLinear", quantized=True),
            vllm=EngineStage(("EagleMistralLarge3ForCausalLM",), "RowParallelLinear", quantized=True, compiled=True),
        ),
    ),
)
