"""Step-3.5: the chain of three MTP layers against the engines' own order of steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from guards import same_bits

H, V, T, LAYERS = 64, 97, 7, 3


CONFIG = ek.MTPConfig.from_hf({"model_type": "step3p7", "text_config": {"hidden_size": H, "rms_norm_eps": 1e-5}})


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (H,), weight.float() + 1, 1e-5).to(x.dtype)


class Layer:
    """One MTP layer with a decoder block that returns its residual separately, as the engines' blocks do."""

    def __init__(self) -> None:
        self.stage = ek.MTPProjection(CONFIG, dtype=torch.bfloat16)
        self.stage.enorm.weight.uniform_(-0.5, 0.5)
        self.stage.hnorm.weight.uniform_(-0.5, 0.5)
        self.mix = torch.randn(H, H).bfloat16() / H**0.5
        self.final_norm = torch.rand(H).bfloat16() - 0.5

    def block(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.mix).tanh() * 5, x


def sglang_chain(layers: list[Layer], target: Tensor, ids: list[list[int]], table: Tensor, head: Tensor) -> list:
    """multi_layer_eagle_worker_v2 with lists: layer k reads layer k - 1's pre-norm states, rows in place, ids rotated.

    The input stage is ours: it is tested against float64 elsewhere, and the bits of everything after it must agree.
    """
    hidden, steps = target, []
    for layer in layers:
        flat = torch.tensor([token for request in ids for token in request])
        h, residual = layer.block(layer.stage(hidden, embeds=table[flat]))
        before_norm = h + residual
        normed = gemma_norm(before_norm, layer.final_norm)
        ends = torch.tensor([len(request) for request in ids]).cumsum(0) - 1
        drafted = (normed[ends] @ head.t()).argmax(-1).tolist()
        steps.append((before_norm, drafted))
        ids = [[*request[1:], token] for request, token in zip(ids, drafted, strict=True)]
        hidden = before_norm
    return steps


@pytest.mark.parametrize("norm_output", [False, True])
def test_three_layers_in_a_chain(norm_output: bool) -> None:
    layers = [Layer() for _ in range(LAYERS)]
    hidden, residual = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    table, head = torch.randn(V, H).bfloat16(), torch.randn(V, H).bfloat16()
    requests = [[3, 14, 15], [9], [26, 53, 58]]
    expected = sglang_chain(layers, hidden + residual, requests, table, head)

    chain = ek.ChainedHiddenStates(T + 3, H, norm_output=norm_output)
    chain.load(hidden, residual)
    ids, last_rows = torch.tensor([3, 14, 15, 9, 26, 53, 58]), torch.tensor([2, 3, 6])
    agreed = []
    for layer, (before_norm, drafted) in zip(layers, expected, strict=True):
        h, x = layer.block(layer.stage(chain.current(T), ids, table=table))
        normed = chain.advance(h, x, layer.final_norm, eps=1e-5, norm_offset=1.0)
        tokens = (normed[last_rows] @ head.t()).argmax(-1)
        agreed.append(same_bits(chain.current(T), before_norm) and tokens.tolist() == drafted)
        ek.rotate_token_ids(ids, tokens, last_rows)
    # Step-3.5 passes on the pre-norm sum: with norm_output every step but the first reads something else.
    assert all(agreed) != norm_output
