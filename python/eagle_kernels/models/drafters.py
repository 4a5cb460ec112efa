"""Every drafter that SGLang 0.5.23 or vLLM 0.33 serves, and what of its input stage the plugins run on our ops.

docs/models.md shows `runs` and `stays`; tests compare `runs` with the plugins' hooks, and the architectures with the
engines' registries.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Drafter:
    """One row of docs/models.md.

    title: whose drafter it is.
    architectures: its names in the engine's registry.
    runs: what runs on our ops; empty where nothing does.
    stays: what stays with the engine, and why; empty where nothing does.
    targets: in SGLang, the hooked methods, by which the plugin knows the drafter: one for all architectures, one for
        each in their order, or, of one architecture, one for each class of its layers.
    """

    title: str
    architectures: tuple[str, ...]
    runs: str = ""
    stays: str = ""
    targets: tuple[str, ...] = ()


_ROW_STREAMS = (
    "the norm over all streams, whose rows are not those that their projection reads, that projection and the "
)
_ROW_STREAMS += "sum, which `MTPStreamsProjection` computes"
_NO_NORMS = "a cat and a GEMM without norms: there is only the cat to save"
_KEYS_AND_VALUES = (
    "keys and values of its layers, which SGLang runs on no CPU: behind that norm they are a GEMM without one, and on "
)
_KEYS_AND_VALUES += "a GPU their norm and rotation one kernel of SGLang's for all layers, layer by layer where it does "
_KEYS_AND_VALUES += "not take them; `ContextKV` computes them"
_CACHE = "the write into the cache, whose layout is the attention backend's"
_MAIN_PROJECTION = "the projection of the captured layers and the norm behind it; the cat in the V2 speculator"
_NORMED_CONTEXT = "the keys of all layers, one GEMM with no norm in front; their norm and rotation, kernels of vLLM's "
_TOKENS = "it reads token ids, no states of the target"
_STAGE = "norms, cat and projection"
_OF_STREAMS = "each norm with the projection behind it, of the embedding and of the streams"
_ON_AMD = "on AMD all of it, where vLLM has other classes, which no test of ours runs"
_LAYER_0 = "norms, cat and qkv of layer 0"
_FP8 = "the layouts of FP8 that the op reads"  # SGLang's Fp8LinearMethod alone is read there
_OTHER_THAN_FP8 = f"a quantized projection, but for {_FP8}"
_OTHER_CODES = "a quantized projection, but for the layouts of FP8 and INT8 that the op reads"

SGLANG = (
    Drafter(
        "EAGLE-3: Llama, Qwen, gpt-oss, Gemma, GLM",
        ("LlamaForCausalLMEagle3",),
        "captures, norms and fc; " + _LAYER_0,
        targets=("models.llama_eagle3:LlamaModel.forward",),
    ),
    Drafter(
        "EAGLE-3 with latent attention: Kimi K2, DeepSeek",
        ("Eagle3DeepseekV2ForCausalLM",),
        "captures, norms and fc; " + _LAYER_0,
        targets=("models.kimi_k25_eagle3:Eagle3MLAModel.forward",),
    ),
    Drafter(
        "Step-3.5, 3.7 MTP",
        ("Step3p5MTP",),
        _STAGE,
        targets=("models.step3p5_mtp:Step3p5AMultiTokenPredictor.forward",),
    ),
    Drafter(
        "Qwen3-Next MTP",
        ("Qwen3NextForCausalLMMTP",),
        _STAGE,
        targets=("models.qwen3_next_mtp:Qwen3NextForCausalLMMTP.forward",),
    ),
    Drafter(
        "DeepSeek V3, V3.2, GLM-5, GLM-5-next MTP",
        ("DeepseekV3ForCausalLMNextN", "GlmMoeDsaForCausalLMNextN", "Glm5NextForConditionalGenerationNextN"),
        _STAGE + ", but for CUDA",
        "on CUDA, where both norms and the cat are one kernel of SGLang's; a projection in Quark's formats",
        ("models.deepseek_nextn:DeepseekModelNextN.forward",),
    ),
    Drafter(
        "GLM-4.5 to 4.7, Lite, GLM-OCR, HunYuan V3 and V4, MiMo, MiMo-V2, Ernie 4.5, EXAONE-MoE, Qwen3-MoE, "
        "GigaChat 3.5 MTP",
        (
            "Glm4MoeForCausalLMNextN",
            "Glm4MoeLiteForCausalLMNextN",
            "GlmOcrForConditionalGenerationNextN",
            "HYV3ForCausalLMNextN",
            "HYV4ForCausalLMNextN",
            "MiMoMTP",
            "MiMoV2MTP",
            "Ernie4_5_MoeForCausalLMMTP",
            "ExaoneMoEForCausalLMMTP",
            "Qwen3MoeForCausalLMMTP",
            "GigaChat35ForCausalLMNextN",
        ),
        _STAGE,
        targets=(
            "models.glm4_moe_nextn:Glm4MoeModelNextN.forward",
            "models.glm4_moe_lite_nextn:Glm4MoeLiteModelNextN.forward",
            "models.glm_ocr_nextn:GlmOcrModelNextN.forward",
            "models.hunyuan_v3_nextn:HYV3ModelNextN.forward",
            "models.hunyuan_v4_nextn:HYV4ModelNextN.forward",
            "models.mimo_mtp:MiMoMultiTokenPredictorLayer.forward",
            "models.mimo_v2_nextn:MiMoV2ModelNextN.forward",
            "models.ernie4_eagle:Ernie4ModelMTP.forward",
            "models.exaone_moe_mtp:ExaoneMoEForCausalLMMTP.forward",
            "models.qwen3_moe_mtp:Qwen3MoeForCausalLMMTP.forward",
            "models.gigachat35_mtp:GigaChat35ModelNextN.forward",
        ),
    ),
    Drafter(
        "Qwen3.5, InternS2 MTP",
        ("Qwen3_5ForCausalLMMTP",),
        _STAGE,
        targets=("models.qwen3_5_mtp:Qwen3_5ForCausalLMMTP.forward",),
    ),
    Drafter("IQuest-Q1 MTP", ("IQuestQ1MTP",), _STAGE, targets=("models.iquest_q1_mtp:IQuestQ1MTPLayer.forward",)),
    Drafter(
        "LongCat-Flash, Ling MTP",
        ("LongcatFlashForCausalLMNextN", "BailingMoeForCausalLMNextN"),
        _STAGE,
        _OTHER_THAN_FP8,
        (
            "models.longcat_flash_nextn:LongcatFlashModelNextN.forward",
            "models.bailing_moe_nextn:BailingMoEModelNextN.forward",
        ),
    ),
    Drafter(
        "dots3-note MTP",
        ("Dots3NoteForCausalLMNextN",),
        _STAGE,
        _OTHER_THAN_FP8,
        ("models.dots3_common.nextn:Dot3NoteModelNextN.forward",),
    ),
    Drafter(
        "Nemotron-H MTP",
        ("NemotronHForCausalLMMTP",),
        _STAGE + " on one rank",
        _OTHER_THAN_FP8 + "; on more ranks the projection, whose columns SGLang gathers from them",
        (
            "models.nemotron_h_mtp:NemotronHMTPAttentionDecoderLayer.forward",
            "models.nemotron_h_mtp:NemotronHMTPMoEDecoderLayer.forward",
        ),
    ),
    Drafter(
        "Inkling MTP",
        ("InklingForConditionalGenerationMTP",),
        _STAGE,
        "the target's norm of the embedding",
        ("models.inkling:InklingMTPLayer.forward",),
    ),
    Drafter(
        "DeepSeek V4 MTP",
        ("DeepseekV4ForCausalLMNextN",),
        _OF_STREAMS,
        f"their sum; {_OTHER_THAN_FP8}; on sm_100 those in FP8 blocks, as DeepSeek ships them, whose scales SGLang "
        "repacks there",
        ("models.deepseek_v4_nextn:DeepseekV4ModelNextN.forward",),
    ),
    Drafter(
        "Qwen4-Exp MTP",
        ("Qwen4ExpForCausalLMMTP",),
        "norm and projection of the embedding; with one stream norms, cat and projection",
        _ROW_STREAMS,
        (
            "models.qwen4_exp_mtp:Qwen4ExpForCausalLMMTP._fuse_residual_linear_shared",
            "models.qwen4_exp_mtp:Qwen4ExpForCausalLMMTP._fuse_standard",
        ),
    ),
    Drafter(
        "Gemma 4 assistants",
        ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
        stays=_NO_NORMS,
    ),
    Drafter(
        "EAGLE-1: Llama, Qwen 2, Mistral, Mistral Large 3",
        (
            "LlamaForCausalLMEagle",
            "Qwen2ForCausalLMEagle",
            "MistralForCausalLMEagle",
            "MistralLarge3ForCausalLMEagle",
        ),
        stays=_NO_NORMS,
    ),
    Drafter(
        "DFlash, DFlash2, LiLiCorr, Muse Glimmer, MiniMax; DSpark: Qwen 3, Ling, LFM2",
        (
            "DFlashDraftModel",
            "LiLiCorrDraftModel",
            "MuseGlimmerAssistantModel",
            "DFlash2DraftModel",
            "DFlash2BeamDraftModel",
            "MiniMaxDFlash2DraftModel",
            "DSparkDraftModel",
            "Qwen3DSparkModel",
            "LingDSparkModel",
            "Lfm2DSparkDraftModel",
        ),
        "fc and the norm behind it",
        f"fc that SGLang holds quantized (LiLiCorr's, Nemotron 3.5's), but for {_FP8}; {_KEYS_AND_VALUES}",
        ("models.dflash:DFlashDraftModel.project_target_hidden",),
    ),
    Drafter(
        "Laguna DFlash",
        ("DFlashLagunaForCausalLM",),
        "norms, cat, fc and the norm behind it",
        "each layer's norm, keys and values, which SGLang runs layer by layer and on no CPU; `ContextKV` computes them",
        ("models.dflash:DFlashLagunaForCausalLM.project_target_hidden",),
    ),
    Drafter(
        "DSpark: MiniMax-M3",
        ("DSparkMiniMaxDraftModel",),
        "fc and the norm behind it on one rank",
        "on more ranks fc, whose columns SGLang gathers in front of the norm; " + _KEYS_AND_VALUES,
        ("models.dspark_minimax:MiniMaxDraftBackbone.project_target_hidden",),
    ),
    Drafter(
        "DSpark: DeepSeek V4 and V4.1",
        ("DeepseekV4ForCausalLMDSpark",),
        "main_proj and the norm behind it",
        "on sm_100 main_proj in FP8 blocks, as DeepSeek ships it, whose scales SGLang repacks there; "
        "the keys of its layers, products with no norm in front; their norm, rotation and write, which are one kernel "
        "of SGLang's pool; `ContextKV` computes them",
        ("models.deepseek_v4_dspark:DeepseekV4ForCausalLMDSpark.project_target_hidden",),
    ),
    Drafter("draft models of their own, the target with an adapter (UNO), n-grams", (), stays=_TOKENS),
)

VLLM = (
    Drafter(
        "EAGLE-3 and P-EAGLE: Llama, Qwen, MiniMax-M2, Qwen-VL",
        (
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3MiniMaxM2ForCausalLM",
            "Eagle3Qwen2_5vlForCausalLM",
            "Eagle3Qwen3vlForCausalLM",
            "PEagleDraftModel",
            "PeagleLlamaForCausalLM",
            "Eagle3Qwen3ForCausalLM",
            "PeagleQwen3ForCausalLM",
        ),
        "norms, cat and fc; " + _LAYER_0,
    ),
    Drafter(
        "EAGLE-3 with latent attention: DeepSeek, Kimi K2",
        ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
        "fc in codes; cat and fc in the V2 speculator, if forced; " + _LAYER_0,
    ),
    Drafter(
        "DFlash, DFlash2, LiLiCorr, XPress, Muse Glimmer; DSpark: Qwen 3",
        (
            "DFlashDraftModel",
            "DFlash2DraftModel",
            "LiLiCorrDraftModel",
            "Qwen3XPressModel",
            "DFlashQwen3XPressModel",
            "MuseGlimmerAssistantModel",
            "DFlashMuseGlimmerAssistantModel",
            "Qwen3DSparkModel",
            "Qwen3OmniDSparkModel",
        ),
        "the norm behind fc and keys and values of all layers, norm and rotation of the keys; cat and fc in the V2 "
        "speculator, if forced",
        _CACHE,
    ),
    Drafter(
        "Laguna DFlash",
        ("DFlashLagunaForCausalLM",),
        "norms, cat, fc and the norm behind it; each layer's norm, keys and values, norm and rotation of the keys",
        _CACHE,
    ),
    Drafter(
        "DeepSeek V3, R1, GLM-4.5 to 4.7, Lite, GLM-OCR, HunYuan V3 and V4, MiMo, MiMo-V2, Ernie 4.5, openPangu, Ling "
        "2.5 MTP",
        (
            "DeepSeekMTPModel",
            "Glm4MoeMTPModel",
            "Glm4MoeLiteMTPModel",
            "GlmOcrMTPModel",
            "HYV3MTPModel",
            "HYV4MTPModel",
            "MiMoMTPModel",
            "MiMoV2MTPModel",
            "MiMoV2OmniMTPModel",
            "ErnieMTPModel",
            "OpenPanguMTPModel",
            "BailingMoeV25MTPModel",
        ),
        _STAGE,
    ),
    Drafter("Step-3.5, 3.7 MTP", ("Step3p5MTP",), _STAGE),
    Drafter("EAGLE-1 with norms: MiniCPM, DeepSeek", ("EagleMiniCPMForCausalLM", "EagleDeepSeekMTPModel"), _STAGE),
    Drafter(
        "DeepSeek V3.2, GLM-5, Kimi K3 MTP",
        ("DeepseekV32MTPModel", "KimiK3MTPModel"),
        "mask, " + _STAGE,
        "where vLLM has a GEMM of its own for the projection (GLM-5's on sm_103 and sm_107, Kimi K3's on sm_90 too) or "
        "gives each rank some of its rows (sequence parallelism of V3.2 and GLM-5); " + _ON_AMD,
    ),
    Drafter("GLM-5-next MTP", ("Glm5NextMTPModel",), "mask, " + _STAGE),
    Drafter("dots3-note MTP", ("Dots3NoteMTPModel",), "mask, " + _STAGE, _OTHER_CODES),
    Drafter("Step-5 MTP", ("Step5MTP",), _STAGE),
    Drafter(
        "LongCat-Flash, Ling 3 MTP",
        ("LongCatFlashMTPModel", "BailingMoeV3MTPModel"),
        _STAGE,
        _OTHER_CODES,
    ),
    Drafter(
        "Qwen3-Next, Qwen3.5, InternS2, EXAONE, Nemotron-H MTP",
        (
            "Qwen3NextMTP",
            "Qwen3_5MTP",
            "Qwen3_5MoeMTP",
            "InternS2MobiusMTP",
            "ExaoneMoeMTP",
            "Exaone4_5_MTP",
            "NemotronHMTPModel",
        ),
        _STAGE + " on one rank",
        _OTHER_CODES + "; on more ranks the projection, whose columns vLLM gathers from them",
    ),
    Drafter("MiniMax-M3 MTP", ("MiniMaxM3MTP",), _STAGE, f"{_OTHER_CODES}; {_ON_AMD}"),
    Drafter(
        "Inkling MTP",
        ("InklingMTPModel",),
        _STAGE,
        f"the target's norm of the embedding, one kernel with the gather; {_OTHER_CODES}; {_ON_AMD}",
    ),
    Drafter(
        "DeepSeek V4 MTP",
        ("DeepSeekV4MTPModel",),
        _OF_STREAMS,
        f"their sum; {_OTHER_CODES}; on XPU and {_ON_AMD}",
    ),
    Drafter(
        "Qwen4-Exp MTP",
        ("Qwen4ExpMTP",),
        "norm and projection of the embedding, on one rank",
        f"{_ROW_STREAMS}; {_OTHER_CODES}; on more ranks all of it, whose columns vLLM gathers from them; {_ON_AMD}",
    ),
    Drafter("Gemma 4 assistants", ("Gemma4MTPModel",), stays=_NO_NORMS),
    Drafter(
        "models of transformers with MTP layers",
        ("TransformersForMTP", "TransformersMoEForMTP"),
        stays="transformers' `MtpModel` runs as it is; `MTPProjection` computes the stage",
    ),
    Drafter(
        "Nemotron Parse 3.5 MTP",
        ("ParseAuxMTPModel",),
        stays="extra_head(hidden + extra_proj(embedding)): two GEMMs in a row, no norm and no concat",
    ),
    Drafter(
        "EAGLE-1: Llama, Llama 4, Cohere, Mistral, Mistral Large 3",
        (
            "EagleLlamaForCausalLM",
            "EagleLlama4ForCausalLM",
            "EagleCohereForCausalLM",
            "EagleMistralForCausalLM",
            "EagleMistralLarge3ForCausalLM",
        ),
        stays=_NO_NORMS,
    ),
    Drafter(
        "DFlash2 Beam",
        ("DFlash2BeamDraftModel",),
        "the norm behind fc and keys and values of all layers; cat and fc in the V2 speculator, if forced",
        "norm and rotation of the keys and the write into the cache, which are one kernel of vLLM's",
    ),
    Drafter(
        "DSpark: Gemma 4",
        ("Gemma4DSparkModel",),
        "the norm behind fc and keys and values of all layers, which are one projection, norm and rotation of the keys "
        "and norm of the values; cat and fc in the V2 speculator, if forced",
        _CACHE,
    ),
    Drafter(
        "DSpark: Muse Spark",
        ("MuseSparkDSparkModel",),
        "the norm behind fc, each layer's norm, keys and values of all layers",
        "fc, which has no norm in front and whose input vLLM rounds from fp32; norm and rotation of the keys; the "
        "write into the cache, whose layout is the attention backend's",
    ),
    Drafter(
        "DSpark: DeepSeek V4 and V4.1",
        ("DSparkDraftModel", "DSparkV41DraftModel"),
        _MAIN_PROJECTION,
        f"{_NORMED_CONTEXT}with the write into the cache; {_ON_AMD}",
    ),
    Drafter(
        "DSpark: Kimi K3",
        ("K3DSparkModel",),
        _MAIN_PROJECTION,
        _NORMED_CONTEXT + "into the latent cache of all layers",
    ),
    Drafter(
        "hidden states for training",
        ("ExtractHiddenStatesModel",),
        stays="it stores captured states and drafts nothing",
    ),
    Drafter("draft models of their own, n-grams, suffixes", (), stays=_TOKENS),
)
