"""The state of quantized layers: what is saved loads as what it was, and what does not fit changes nothing."""

import re
from pathlib import Path

import pytest
import torch

import eagle_kernels as ek
from eagle_kernels.quantized_weight import FORMATS
from guards import same_bits

save_file = pytest.importorskip("safetensors.torch").save_file

K, H, D = 3, 64, 136  # 136 rows: no block divides them
W = K * H


def eagle3(format: str | None = None, seed: int = 0, bias: bool = False) -> ek.Eagle3Projection:
    config = ek.Eagle3Config(num_chunks=K, target_hidden_size=H, hidden_size=D, bias=bias)
    layer = ek.Eagle3Projection(config, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    layer.fc.weight.copy_(torch.randn(D, W) * 10**seed)
    return layer if format is None else layer.quantize(format)


def mtp(format: str | None = None) -> ek.MTPProjection:
    layer = ek.MTPProjection(ek.MTPConfig(H, D), dtype=torch.bfloat16)
    torch.manual_seed(2)
    layer.eh_proj.weight.copy_(torch.randn(D, 2 * H))
    return layer if format is None else layer.quantize(format)


@pytest.mark.parametrize("format", FORMATS)
def test_a_saved_state_dict_loads_as_a_checkpoint(format: str, tmp_path: Path) -> None:
    """nvfp4's global scale came back as its reciprocal: a multiplier under compressed-tensors' name of a divisor."""
    for make, prefix in ((eagle3, ""), (mtp, "model.layers.61.")):
        layer, file = make(format), tmp_path / "model.safetensors"
        save_file({prefix + name: tensor for name, tensor in layer.state_dict().items()}, file)
        loaded = make().load_checkpoint(file).state_dict()
        assert loaded.keys() == layer.state_dict().keys()
        assert all(same_bits(loaded[name], tensor) for name, tensor in layer.state_dict().items())


def under_the_old_name(layer: ek.Eagle3Projection) -> dict[str, torch.Tensor]:
    state = dict(layer.state_dict())
    return state | {"fc.weight_global_scale": state.pop("fc.weight_scale_2")}


def test_a_state_dict_of_the_old_name_is_refused() -> None:
    expected = (
        "Eagle3Projection.load_checkpoint: weights has fc.weight_global_scale beside fc.weight, expected "
        "weight_scale_2, because the divisor of compressed-tensors is beside weight_packed, and state_dict once called "
        "the multiplier so"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        eagle3().load_checkpoint(under_the_old_name(eagle3("nvfp4")))
