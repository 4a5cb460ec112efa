"""The layers through the real `kernels` library, on CPU: by `mapping` and kernelize, into whole models."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("kernels")

import kernels

from accuracy import outliers, relative_rms
from eagle_kernels.engines.hf_kernels import LAYERS, layers, mapping
from eagle_kernels.ops.sources import Sources, formula

T, K, H, D = 5, 3, 48, 40
BF16 = torch.bfloat16


class Norm(nn.Module):
    """A norm of a transformers model, with the attribute names that its layers use."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(H) / 8 + 1 - offset).to(BF16))
        self.variance_epsilon = self.eps = 1e-5
        self.offset = offset


@kernels.use_kernel_forward_from_hub("RMSNorm")
class LlamaNorm(Norm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return eager_norm(hidden_states, self, torch.float32).to(hidden_states.dtype)


@kernels.use_kernel_forward_from_hub("GemmaRMSNorm")
class GemmaNorm(Norm):
    def __init__(self) -> None:
        super().__init__(offset=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return eager_norm(x, self, torch.float32).to(x.dtype)


@kernels.use_kernel_forward_from_hub("Eagle3Projection")
class Drafter(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.fc_norm = nn.ModuleList([Norm() for _ in range(K)])
        self.fc = nn.Linear(K * H, D, bias=bias, dtype=BF16)

    def forward(self, hidden_states: Tensor) -> Tensor:
        chunks = zip(self.fc_norm, hidden_states.chunk(K, -1), strict=True)
        return self.fc(torch.cat([eager_norm(chunk, norm, torch.float32).to(BF16) for norm, chunk in chunks], -1))


@kernels.use_kernel_forward_from_hub("MTPProjection")
class MTP(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.enorm, self.hnorm = Norm(), Norm()
        self.eh_proj = nn.Linear(2 * H, D, bias=bias, dtype=BF16)

    def forward(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        normed = [
            eager_norm(x, norm, torch.float32).to(BF16)
            for norm, x in ((self.enorm, inputs_embeds), (self.hnorm, hidden_states))
        ]
        return self.eh_proj(torch.cat(normed, -1))


def eager_norm(x: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    return F.rms_norm(x.to(dtype), (H,), norm.weight.to(dtype) + norm.offset, norm.eps)


def kernelized(model: nn.Module, **options: object) -> nn.Module:
    with kernels.use_kernel_mapping(mapping(*LAYERS), inherit_mapping=False):
        return kernels.kernelize(model, **{"mode": kernels.Mode.INFERENCE, "device": "cpu"} | options)


@torch.no_grad()
@pytest.mark.parametrize("norm", [LlamaNorm, GemmaNorm])
@pytest.mark.parametrize("shape", [(T, H), (2, T, H), (0, H)], ids=str)
def test_norms(norm: type[Norm], shape: tuple[int, ...]) -> None:
    model = nn.Sequential(norm())
    x = outliers(2 * T, H, BF16, torch.Generator().manual_seed(1)).flatten()[: torch.Size(shape).numel()]
    x = x.view(shape)
    expected, truth = model(x), eager_norm(x, model[0], torch.float64)
    result = kernelized(model, use_fallback=False)(x)
    assert model[0].forward.__func__.__qualname__.startswith(model[0].kernel_layer_name)
    assert result.shape == x.shape
    if x.numel():
        rows = (-1, H)
        assert relative_rms(result.view(rows), truth.view(rows)) <= 1.05 * relative_rms(
            expected.view(rows), truth.view(rows)
        )


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(T,), (2, T)], ids=str)
def test_drafter(leading: tuple[int, ...], bias: bool) -> None:
    model = Drafter(bias)
    x = outliers(torch.Size(leading).numel(), K * H, BF16, torch.Generator().manual_seed(1))
    expected = model(x)
    gains, eps = [norm.weight for norm in model.fc_norm], [norm.eps for norm in model.fc_norm]
    normed = formula(Sources([x.double()], K, "chunk", gains, eps, 0.0, [], [], None), torch.float64)
    truth = F.linear(normed, model.fc.weight.double(), model.fc.bias.double() if bias else None)
    result = kernelized(model, use_fallback=False)(x.view(*leading, K * H))
    assert result.shape == (*leading, D)
    assert relative_rms(result.view(-1, D), truth) <= 1.05 * relative_rms(expected, truth)


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_mtp(bias: bool) -> None:
    model = MTP(bias)
    embeds, hidden = (outliers(T, H, BF16, torch.Generator().manual_seed(seed)) for seed in (1, 2))
    expected = model(embeds, hidden)
    norms = (model.enorm, model.hnorm)
    normed = torch.cat(
        [eager_norm(x, norm, torch.float64) for norm, x in zip(norms, (embeds, hidden), strict=True)], -1
    )
    truth = F.linear(normed, model.eh_proj.weight.double(), model.eh_proj.bias.double() if bias else None)
    result = kernelized(model, use_fallback=False)(embeds, hidden)
    assert relative_rms(result, truth) <= 1.05 * relative_rms(expected, truth)


@torch.no_grad()
@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_no_rows(leading: tuple[int, ...]) -> None:
    """view(..., -1) cannot infer a width from no elements."""
    drafter, mtp = (kernelized(model, use_fallback=False) for model in (Drafter(), MTP()))
    assert drafter(torch.empty(*leading, K * H, dtype=BF16)).shape == (*leading, D)
    hidden = torch.empty(*leading, H, dtype=BF16)
    assert mtp(hidden, hidden).shape == (*leading, D)


@torch.no_grad()
def test_an_adapter_is_not_left_out() -> None:
    class Adapted(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.weight, self.bias = base_layer, base_layer.weight, base_layer.bias

    drafter, mtp = (kernelized(model, use_fallback=False) for model in (Drafter(), MTP()))
    drafter.fc, mtp.eh_proj = Adapted(drafter.fc), Adapted(mtp.eh_proj)
    hidden = torch.randn(T, H).to(BF16)
    with pytest.raises(RuntimeError, match="merge the adapter"):
        drafter(torch.randn(T, K * H).to(BF16))
    with pytest.raises(RuntimeError, match="merge the adapter"):
        mtp(hidden, hidden)


@torch.no_grad()
def test_weights_loaded_later_are_read() -> None:
    model, x = kernelized(nn.Sequential(LlamaNorm())), torch.randn(T, H).to(BF16)
    before = model(x)
    model[0].weight.data.mul_(2)
    assert torch.equal(model(x), 2 * before)


def test_training_falls_back() -> None:
    """The ops have no backward, which the layers declare."""
    model = kernelized(nn.Sequential(LlamaNorm()), mode=kernels.Mode.TRAINING)
    assert model[0].forward.__func__ is LlamaNorm.forward
    model(torch.randn(T, H).to(BF16)).sum().backward()
    assert model[0].weight.grad is not None


def test_an_unknown_layer_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ValueError, match="mapping: a layer name is 'LayerNorm', expected one of") as refused:
        mapping("RMSNorm", "LayerNorm")
    found = {name for name, kind in vars(layers).items() if getattr(kind, "__module__", None) == layers.__name__}
    assert found == set(LAYERS) and all(name in str(refused.value) for name in LAYERS)


def test_kernelize_without_the_mapping_restores_the_model() -> None:
    model = kernelized(nn.Sequential(LlamaNorm()))
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
    assert model[0].forward.__func__ is LlamaNorm.forward


def test_a_gradient_is_not_cut_silently() -> None:
    model = kernelized(nn.Sequential(LlamaNorm()))
    with pytest.raises(RuntimeError, match="requires grad"):
        model(torch.randn(T, H).to(BF16).requires_grad_())


def test_a_layer_with_another_signature_is_refused() -> None:
    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Residual(Norm):
        def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
            return hidden_states + residual

    from kernels.layer.layer import _CACHED_LAYER

    _CACHED_LAYER.clear()  # the library validates a layer once
    with pytest.raises(TypeError, match="different number of arguments"):
        kernelized(nn.Sequential(Residual()))


@torch.no_grad()
def test_transformers_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model: every norm of Llama is replaced; the logits agree up to one rounding per norm."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sizes = {"vocab_size": 64, "hidden_size": H, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (2, T))
    expected = model(ids).logits
    monkeypatch.setattr(LlamaRMSNorm, "kernel_layer_name", "RMSNorm", raising=False)
    kernelized(model, use_fallback=kernels.KernelizeFallback.NO_LAYER)
    norms = [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]
    assert len(norms) == 5 and all("forward" in vars(norm) for norm in norms)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_form(layer: str) -> None:
    """No state of its own: no constructor, no member that the library does not allow."""
    cls = getattr(layers, layer)
    assert cls.__init__ is nn.Module.__init__
    extra = {name for name, _ in inspect.getmembers(cls)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert extra == {"can_torch_compile", "has_backward"}
    assert cls.can_torch_compile and not cls.has_backward
    assert set(cls.__annotations__) and all(not hasattr(cls, name) for name in cls.__annotations__)


@torch.no_grad()
@pytest.mark.slow
def test_compiled() -> None:
    model, x = kernelized(Drafter(), mode=kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE), torch.randn(T, K * H)
    x = x.to(BF16)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
