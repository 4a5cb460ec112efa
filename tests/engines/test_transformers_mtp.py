"""MTPProjection and ChainedHiddenStates in step with the MTP layers of transformers, on real models, layer by layer."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from guards import same_bits

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers.cache_utils import MtpCache  # noqa: E402
from transformers.modeling_layers import MtpModel  # noqa: E402

from eagle_kernels.engines.transformers import capture  # noqa: E402
from tiny_models import LAYERS, VOCABULARY, H, deepseek_v3_with_mtp, randomise, step3p7_with_mtp  # noqa: E402

LENGTH = 6


@pytest.fixture(scope="module", params=[deepseek_v3_with_mtp, step3p7_with_mtp], ids=["deepseek_v3", "step3p7"])
def models(request: pytest.FixtureRequest) -> tuple[torch.nn.Module, MtpModel]:
    torch.manual_seed(0)
    target = randomise(request.param()).bfloat16().eval()
    return target, randomise(MtpModel(target, target.config.get_text_config().num_mtp_layers)).bfloat16().eval()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Recorded:
    """The inputs and outputs of each MTP layer of the reference while it drafts."""

    def __init__(self, mtp: MtpModel) -> None:
        self.previous, self.projected, self.block, self.normed = [], [], [], []
        self.hooks = []
        for layer in mtp.layers:
            take = {
                layer: lambda module, args, output: self.previous.append(args[1][0]),
                layer.eh_proj: lambda module, args, output: self.projected.append(output[0]),
                layer.mtp_block: lambda module, args, output: self.block.append(output[0]),
                layer.post_norm: lambda module, args, output: self.normed.append(output[0]),
            }
            self.hooks += [module.register_forward_hook(hook) for module, hook in take.items()]


def test_every_layer_of_the_chain_has_the_reference_s_inputs(models: tuple[torch.nn.Module, MtpModel]) -> None:
    target, mtp = models
    config = ek.MTPConfig.from_hf(target.config, engine="transformers")
    table = target.get_input_embeddings().weight
    ids = torch.randint(VOCABULARY, (1, LENGTH + 1))
    prefill = ek.AuxHiddenStates(LENGTH, 1, H)
    with capture(target, [LAYERS], prefill):
        target(ids[:, :-1])
    chain = ek.ChainedHiddenStates(LENGTH + 2, H, norm_output=True)
    chain.load(prefill.packed(LENGTH))

    reference = Recorded(mtp)
    drafted, _, _ = mtp(
        input_ids=ids[:, 1:],
        last_hidden_states=prefill.packed(LENGTH).unsqueeze(0),
        attention_mask=None,
        position_ids=torch.arange(1, LENGTH + 1).unsqueeze(0),
        mtp_cache=MtpCache(config=mtp.config),
    )
    for hook in reference.hooks:
        hook.remove()

    current_ids, last_row = ids[0, 1:].clone(), torch.tensor([LENGTH - 1])
    for k in range(len(mtp.layers)):
        layer = ek.MTPProjection(config, dtype=torch.bfloat16).load_checkpoint(mtp.state_dict(), layer=k)
        projected = layer(reference.previous[k], current_ids, table=table)
        truth = float64_projection(layer, table[current_ids], reference.previous[k])
        limit, _ = rms_limit(torch.bfloat16, 2 * H, truth, reference.projected[k])
        assert relative_rms(projected, truth) <= limit
        # Two norms, each rounded at most twice, of bit-equal states.
        assert relative_rms(chain.current(LENGTH), reference.previous[k].double()) <= 2**-8

        # transformers' decoder layers add the residual themselves.
        norm, block = mtp.layers[k].post_norm, reference.block[k]
        offset = config.norm_offset
        normed = chain.advance(block, torch.zeros_like(block), norm.weight, eps=config.hnorm_eps, norm_offset=offset)
        truth = F.rms_norm(block.double(), (H,), norm.weight.double() + offset, config.hnorm_eps)
        limit, _ = rms_limit(torch.bfloat16, H, truth, reference.normed[k])
        assert relative_rms(normed, truth) <= limit
        assert same_bits(chain.other[:LENGTH], block)
        ek.rotate_token_ids(current_ids, drafted[0, k : k + 1], last_row)
    assert current_ids.tolist() == [*ids[0, 1 + len(mtp.layers) :].tolist(), *drafted[0].tolist()]


def float64_projection(layer: ek.MTPProjection, embeds: Tensor, hidden: Tensor) -> Tensor:
    config = layer.config
    normed = [
        F.rms_norm(x.double(), (H,), norm.weight.double() + config.norm_offset, eps)
        for x, norm, eps in ((embeds, layer.enorm, config.enorm_eps), (hidden, layer.hnorm, config.hnorm_eps))
    ]
    return F.linear(torch.cat(normed, -1), layer.eh_proj.weight.double())
