"""Gemma 3 and Gemma 4: embedding scale and assistant against the modules of transformers."""

import pytest
import torch
import torch.nn.functional as F

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from eagle_kernels.models import families
from guards import same_bits

pytest.importorskip("transformers")

from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4

V, H = 64, 1152  # sqrt(1152) = 33.94 is 34 in bf16


@pytest.mark.parametrize(
    ("name", "embedding"),
    [
        ("gemma3", modeling_gemma3.Gemma3TextScaledWordEmbedding),
        ("gemma4", modeling_gemma4.Gemma4TextScaledWordEmbedding),
    ],
)
def test_the_scaled_embedding_has_the_bits_of_each_engine(name: str, embedding: type) -> None:
    theirs = embedding(V, H, 0, embed_scale=H**0.5).bfloat16()
    torch.nn.init.normal_(theirs.weight)
    table, ids = theirs.weight.detach(), torch.randint(V, (31,))
    shard = ek.VocabShard.build(V, tp_rank=0, tp_size=1)

    def ours(engine: str) -> torch.Tensor:
        rounded = engine in families()[name].scale_rounded_by
        config = ek.MTPConfig(H, embedding_scale=H**0.5, round_embedding_scale=rounded)
        scale = ek.MTPProjection(config)._scales[torch.bfloat16]
        return ek.VocabParallelEmbedding.from_weight(table, shard, scale=scale)(ids)

    assert same_bits(ours("transformers"), theirs(ids).detach()) and same_bits(ours("vllm"), ours("transformers"))
    # SGLang 0.5.23 gemma3_causal: the row times the Python float.
    assert same_bits(ours("sglang"), table[ids] * H**0.5)
    assert not torch.equal(ours("sglang"), ours("vllm"))


def test_the_assistant_projects_scaled_embeddings_without_norms() -> None:
    # transformers 5.23 builds no Gemma4AssistantForCausalLM: its check of shared KV layers refuses every config.
    config = {"model_type": "gemma4_assistant", "backbone_hidden_size": H, "text_config": {"hidden_size": 32}}
    pre_projection = torch.nn.Linear(2 * H, 32, bias=False).bfloat16()
    layer = ek.MTPProjection(ek.MTPConfig.from_hf(config, engine="transformers"), dtype=torch.bfloat16)
    layer.load_checkpoint({"pre_projection.weight": pre_projection.weight.detach()})
    target = modeling_gemma4.Gemma4TextScaledWordEmbedding(V, H, 0, embed_scale=H**0.5).bfloat16()
    hidden, ids = torch.randn(5, H).bfloat16(), torch.randint(V, (5,))
    with torch.no_grad():
        concat = torch.cat([target(ids), hidden], -1)
        truth, eager = F.linear(concat.double(), pre_projection.weight.double()), pre_projection(concat)
        ours = layer(hidden, ids, table=target.weight)
    limit, _ = rms_limit(torch.bfloat16, 2 * H, truth, eager)
    assert relative_rms(ours, truth) <= limit
