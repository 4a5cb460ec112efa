"""What the test of each family holds its description against: the modules of transformers and the ops."""

import torch
import torch.nn.functional as F
from torch import nn

import eagle_kernels as ek
from accuracy import relative_rms, rms_limit
from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.models import ModelFamily, find_family


def check_model_types(family: ModelFamily, *configs: type) -> None:
    """The `model_type` of these config classes leads to the family."""
    for config in configs:
        assert find_family(config.model_type) is family, config.model_type


def check_norm_offset(family: ModelFamily, norm: nn.Module) -> None:
    """A norm of the target, with gains far from their initial value, is norm_concat with the family's offset."""
    H = norm.weight.shape[0]
    x = torch.randn(9, H) * 3
    with torch.no_grad():
        norm.weight.copy_(torch.rand(H) - 0.2)
        eager = norm(x)
        gain = norm.weight.double() + family.norm_offset
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        truth = F.rms_norm(x.double(), (H,), gain, eps)
        ours = ek.norm_concat([x], norm_weight=[norm.weight], eps=eps, norm_offset=family.norm_offset)
    limit, _ = rms_limit(torch.float32, H, truth, eager)
    assert relative_rms(eager, truth) < 1e-6, "the description is not what the model computes"
    assert relative_rms(ours, truth) <= limit


def check_presets(family: ModelFamily) -> None:
    """Every shape is a bench preset with the family's facts; ids and boundaries agree with capture_layers."""
    assert family.shapes
    for entry in family.shapes:
        shape = model_shapes()[entry["name"]]
        assert shape.norm_offset == family.norm_offset
        for stage in shape.stages:
            # Drafters have plain norms even for a (1 + w) target; MTP layers have the target's.
            assert stage.norm_offset == (family.norm_offset if stage.kind == "mtp" else 0.0)
            if stage.kind == "eagle3" and stage.boundaries is not None:
                boundaries = ek.capture_layers(family.model_types[0], shape.num_layers, stage.layer_ids)
                assert tuple(boundaries) == stage.boundaries
