"""Every MTP family, as each engine serves it, against plain torch written from the engines' sources, and against the
MTP layer of transformers with the model's own norm.

The references here were read from SGLang 0.5.23 and vLLM 0.33, not from the table: whoever edits a row edits its
reference too.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from eagle_kernels.models import families
from family_checks import norm_of

H, D, V, T = 64, 64, 50, 9
EPS = 3e-3  # with states of this size it is a third of their mean square
PROJECTED = 48


@dataclass(frozen=True)
class Served:
    """What an engine does: the chain, then "zero" where it masks position 0 and "bias" where eh_proj has one."""

    words: str

    @property
    def chain(self) -> str:
        return self.words.split()[0]

    def __contains__(self, word: str) -> bool:
        return word in self.words.split()


@dataclass(frozen=True)
class Reference:
    """order: "EH" or "HE". gain: 0 for w, 1 for 1 + w, None without norms. names: of the three weights, or the one."""

    sglang: str | None
    vllm: str | None
    gain: float | None = 0.0
    order: str = "EH"
    names: str = "enorm hnorm eh_proj"
    eps: str = "rms_norm_eps"
    scale: float = 1.0
    config: tuple = ()
    types: tuple[str, ...] = ()


_QWEN = "pre_fc_norm_embedding pre_fc_norm_hidden fc"
REFERENCES = {
    "deepseek_v3": Reference("normed", "normed zero"),  # deepseek_nextn; deepseek_mtp
    "deepseek_v32": Reference("normed", "normed zero"),  # deepseek_nextn; deepseek_v32/nvidia/mtp
    "glm_moe_dsa": Reference("normed", "normed zero"),
    "glm5_next": Reference("normed", "normed zero"),  # glm5_next_nextn; glm5next/common/mtp: fused_eh_norm
    "dots3_note": Reference("normed", "normed zero"),  # dots3_common/nextn; dots3_note/nvidia/mtp
    "pangu_ultra_moe": Reference(None, "normed zero"),  # openpangu_mtp has deepseek_mtp's forward
    "kimi_k3": Reference(None, "pre-norm zero"),  # kimi_k3/nvidia/mtp: fused_mtp_input
    "qwen3_next": Reference("normed", "normed", 1.0, names=_QWEN),
    "qwen3_5": Reference("normed", "normed", 1.0, names=_QWEN),
    "intern_s2": Reference("normed", "normed", 1.0, names=_QWEN),
    "qwen3_moe": Reference("normed", None, names=_QWEN),
    "exaone_moe": Reference("normed", "normed", names=_QWEN),
    "exaone4_5": Reference(None, "normed", names=_QWEN),
    "glm4_moe": Reference("normed", "pre-norm zero"),
    "glm4_moe_lite": Reference("normed", "pre-norm zero"),
    "glm_ocr": Reference("normed", "pre-norm zero"),
    "mimo": Reference("normed zero", "normed zero", order="HE", names="token_layernorm hidden_layernorm input_proj"),
    "mimo_v2": Reference("target", "normed", eps="layernorm_epsilon"),
    "ernie4_5_moe": Reference(
        "pre-norm zero bias",
        "pre-norm zero",
        names="mtp_emb_norm mtp_hidden_norm mtp_linear_proj",
        config=(("use_bias", True),),
    ),
    "longcat_flash": Reference("normed", "normed"),
    "nemotron_h": Reference("normed", "normed", eps="layer_norm_epsilon"),
    "bailing_moe": Reference("normed", "normed zero"),
    "bailing_moe_v3": Reference("normed", "normed", config=(("architectures", ["BailingMoeV3ForCausalLM"]),)),
    "hy_v3": Reference("normed", "normed zero"),
    "hy_v4": Reference("normed", "normed"),  # hy_v4/nvidia/mtp masks nothing
    "minimax_m3": Reference(None, "pre-norm zero", 1.0),
    "step3p5": Reference("pre-norm", "pre-norm", 1.0),
    "step5": Reference(None, "pre-norm", 1.0),
    "gigachat3_5": Reference("pre-norm", None, config=(("norm_type", "LlamaRMSNorm"),)),
    "iquest_q1": Reference("normed", None),
    "inkling": Reference("pre-norm", "pre-norm", order="HE", names="embed_norm hidden_norm input_proj"),
    "gemma4": Reference(
        "projected",
        "projected",
        None,
        names="pre_projection",
        scale=H**0.5,
        config=(("backbone_hidden_size", H), ("hidden_size", PROJECTED)),
        types=("gemma4_assistant", "gemma4_unified_assistant"),
    ),
    "llama_eagle": Reference("pre-norm bias", "pre-norm", None, names="fc"),
    "llama4_eagle": Reference(None, "normed", None, names="fc"),
    "cohere_eagle": Reference(None, "normed bias", None, names="fc"),
    "minicpm_eagle": Reference(
        None, "pre-norm", names="input_norm1 input_norm2 fc", scale=12.0, config=(("scale_emb", 12),)
    ),
    "deepseek_eagle": Reference(None, "normed", names="enorm hnorm fc"),
    "mistral_eagle": Reference("pre-norm", "normed", None, names="eagle_linear"),
    "mistral_large_3_eagle": Reference("normed", "normed", None, names="eagle_linear"),
}
CONCATS = {name: family for name, family in families().items() if family.mtp is not None and not family.mtp.streams}
SERVED = [
    pytest.param(name, engine, id=f"{name}-{engine}")
    for name, reference in REFERENCES.items()
    for engine in ("sglang", "vllm")
    if getattr(reference, engine) is not None
]


def test_every_row_has_a_reference_and_every_engine_of_it() -> None:
    assert set(CONCATS) == set(REFERENCES)
    for name, family in CONCATS.items():
        expected = [engine for engine in ("sglang", "vllm") if getattr(REFERENCES[name], engine) is not None]
        assert list(family.mtp.engines) == expected, name


def configs(name: str) -> list[dict]:
    """A config for each model type of the family; for each architecture, where it has no model type of its own."""
    family, reference = CONCATS[name], REFERENCES[name]
    base = {"hidden_size": H, reference.eps: EPS, **dict(reference.config)}
    types = reference.types or family.model_types
    if not types:
        return [base | {"model_type": "llama", "architectures": [name]} for name in sorted(family.architectures)]
    return [base | {"model_type": model_type} for model_type in types]


def weights(reference: Reference, out_features: int, bias: bool) -> dict[str, Tensor]:
    *norms, projection = reference.names.split()
    tensors = {f"{norm}.weight": torch.rand(H) + 0.5 - (reference.gain or 0.0) for norm in norms}
    tensors[f"{projection}.weight"] = torch.randn(out_features, 2 * H) / H**0.5
    if bias:
        tensors[f"{projection}.bias"] = torch.randn(out_features)
    return tensors


def plain(
    reference: Reference, served: Served, tensors: dict, rows: Tensor, hidden: Tensor, positions: Tensor
) -> Tensor:
    """The stage as the engines compute it, in the dtype of its inputs."""
    *norms, projection = reference.names.split()
    e, h = rows * reference.scale, hidden
    if "zero" in served:
        e = torch.where(positions.unsqueeze(-1) == 0, 0, e)
    if norms:
        e, h = (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (reference.gain + tensors[f"{norm}.weight"])
            for x, norm in zip((e, h), norms, strict=True)
        )
    concat = torch.cat([e, h] if reference.order == "EH" else [h, e], -1)
    y = concat @ tensors[f"{projection}.weight"].T
    return y + tensors[f"{projection}.bias"] if "bias" in served else y


@pytest.mark.parametrize(("name", "engine"), SERVED)
def test_the_stage_is_that_of_the_engine(name: str, engine: str) -> None:
    torch.manual_seed(0)
    reference = REFERENCES[name]
    served = Served(getattr(reference, engine))
    table, hidden = torch.randn(V, H) * 0.1, torch.randn(T, H) * 0.1
    ids, positions = torch.randint(V, (T,)), torch.arange(T) % 4
    for config in configs(name):
        stage = ek.MTPConfig.from_hf(config, engine=engine)
        assert stage.chain == served.chain
        tensors = weights(reference, stage.out_features, "bias" in served)
        layer = ek.MTPProjection(stage, dtype=torch.float32).load_checkpoint(tensors)
        source = {"embeds": table[ids]} if stage.embedding_prenormed else {"ids": ids, "table": table}
        ours = layer(hidden, positions=positions, **source)
        doubles = {key: tensor.double() for key, tensor in tensors.items()}
        truth = plain(reference, served, doubles, table[ids].double(), hidden.double(), positions)
        eager = plain(reference, served, tensors, table[ids], hidden, positions)
        limit, _ = rms_limit(torch.float32, 2 * H, truth, eager)
        assert relative_rms(ours, truth) <= limit, config


MODEL_TYPES = [
    (name, model_type) for name, family in CONCATS.items() if family.mtp.normed for model_type in family.model_types
]


@pytest.mark.parametrize(("name", "model_type"), MODEL_TYPES, ids=[model_type for _, model_type in MODEL_TYPES])
def test_the_stage_is_that_of_transformers(name: str, model_type: str) -> None:
    """transformers' MtpLayer around an empty block, with the model's norm and the fields of the model's config."""
    pytest.importorskip("transformers", minversion="5.23")
    from transformers.modeling_layers import MtpLayer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    norm_class = norm_of(model_type)

    theirs = CONFIG_MAPPING[model_type]().get_text_config()
    fields = {"hidden_size": H, "rms_norm_eps": EPS, "norm_type": "LlamaRMSNorm"}
    stage = families()[name].mtp
    if hasattr(theirs, stage.eps_field):
        fields[stage.eps_field] = EPS
    for field in ("mtp_hidden_states_first", "chain_hidden_post_norm"):
        if hasattr(theirs, field):
            fields[field] = getattr(theirs, field)
    config = ek.MTPConfig.from_hf(fields | {"model_type": model_type}, engine="transformers")
    assert config.chain == ("pre-norm" if fields.get("chain_hidden_post_norm") is False else "normed")

    class Block(torch.nn.Module):
        def __init__(self, *_: object) -> None:
            super().__init__()

        def forward(self, hidden: Tensor, **_: object) -> Tensor:
            return hidden

    torch.manual_seed(0)
    reference = MtpLayer(SimpleNamespace(**fields), Block, norm_class, 0, False)
    for norm in (reference.enorm, reference.hnorm):
        torch.nn.init.uniform_(norm.weight, 0.5 - config.norm_offset, 1.5 - config.norm_offset)
    layer = ek.MTPProjection(config, dtype=torch.float32).load_checkpoint(reference.state_dict())
    embeds, hidden = torch.randn(T, H) * 0.1, torch.randn(T, H) * 0.1
    with torch.no_grad():
        eager = reference(embeds, hidden, None, None, None, None)
        truth = reference.double()(embeds.double(), hidden.double(), None, None, None, None)
    limit, _ = rms_limit(torch.float32, 2 * H, truth, eager)
    # A norm that always computes in fp32 gives no float64 truth.
    assert relative_rms(layer(hidden, embeds=embeds), truth) <= max(limit, 1e-6)


def test_inkling_s_chain_is_normed_where_the_config_says_so() -> None:
    config = {"model_type": "inkling_mm_model", "text_config": {"hidden_size": H, "chain_hidden_post_norm": True}}
    assert [ek.MTPConfig.from_hf(config, engine=engine).chain for engine in ("sglang", "vllm")] == ["normed"] * 2


@pytest.mark.parametrize(
    ("of_mtp", "of_text", "expected"),
    [
        pytest.param(True, None, "normed normed normed", id="as-published"),
        pytest.param(True, False, "normed normed pre-norm", id="false-in-text"),
        pytest.param(False, True, "pre-norm pre-norm normed", id="true-in-text"),
        pytest.param(None, True, "normed pre-norm normed", id="in-text-alone"),
        pytest.param(None, None, "pre-norm pre-norm pre-norm", id="nowhere"),
    ],
)
def test_inkling_s_chain_is_in_mtp_config(of_mtp: bool | None, of_text: bool | None, expected: str) -> None:
    """SGLang's text part is the default, vLLM's is overwritten, transformers' comes first."""
    text = {"hidden_size": H, "chain_hidden_post_norm": of_text}
    config = {"model_type": "inkling_mm_model", "text_config": text}
    config |= {"mtp_config": {"num_nextn_predict_layers": 8, "chain_hidden_post_norm": of_mtp}}
    engines = ("sglang", "vllm", "transformers")
    assert [ek.MTPConfig.from_hf(config, engine=engine).chain for engine in engines] == expected.split()


def test_step5_and_gigachat_say_themselves_what_gains_are_added_to() -> None:
    step5 = {"model_type": "step5", "hidden_size": H, "zero_centered": False}
    assert ek.MTPConfig.from_hf(step5, engine="vllm").norm_offset == 0.0
    gigachat = {"model_type": "gigachat3_5", "hidden_size": H}
    assert ek.MTPConfig.from_hf(gigachat | {"norm_type": "ZeroCenteredRMSNorm"}).norm_offset == 1.0
    with pytest.raises(
        ValueError, match=r"norm_type is 'GatedNorm', expected one of \[.*\], because another norm is no"
    ):
        ek.MTPConfig.from_hf(gigachat | {"norm_type": "GatedNorm"})
    with pytest.raises(ValueError, match="norm_type is None, expected one of"):  # its default is a gated one
        ek.MTPConfig.from_hf(gigachat)
