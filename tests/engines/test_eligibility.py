"""The questions every engine plugin asks: switches, layers, and each answer logged once."""

import logging

import pytest
import torch
from torch import nn

from eagle_kernels import environment
from eagle_kernels.engines import eligibility

PARTS = {"combine": True, "embedding": False}
K, H, D = 3, 8, 5


class Unquantized:
    """Stands in for an engine's linear method that leaves the weight unchanged."""


class Fp8(Unquantized):
    """A subclass may repack the weight, so only the exact type is accepted."""


class EngineLinear(nn.Module):
    def __init__(self, method: object, **changes: object) -> None:
        super().__init__()
        self.input_size, self.output_size, self.quant_method, self.bias = K * H, D, method, None
        self.weight = nn.Parameter(torch.randn(D, K * H).bfloat16(), requires_grad=False)
        for name, value in changes.items():
            setattr(self, name, value)


def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=dtype), requires_grad=False)


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        pytest.param({}, {"combine"}, id="defaults"),
        pytest.param({"EAGLE_KERNELS_VLLM": "0", "EAGLE_KERNELS_VLLM_EMBEDDING": "1"}, set(), id="all-off"),
        pytest.param({"EAGLE_KERNELS_VLLM": "1"}, {"combine"}, id="all-on-is-the-default"),
        pytest.param({"EAGLE_KERNELS_VLLM_COMBINE": "0"}, set(), id="one-off"),
        pytest.param({"EAGLE_KERNELS_VLLM_EMBEDDING": "1"}, {"combine", "embedding"}, id="one-on"),
        pytest.param({"EAGLE_KERNELS_SGLANG": "0"}, {"combine"}, id="another-engine's"),
    ],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], on: set[str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.engine_switches("vllm", PARTS) == environment.EngineSwitches(frozenset(on), False, ())


def test_force_turns_no_part_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_VLLM", "force")
    assert environment.engine_switches("vllm", PARTS) == environment.EngineSwitches(frozenset({"combine"}), True, ())


@pytest.mark.parametrize(
    ("name", "value", "on", "sentence"),
    [
        pytest.param(
            "EAGLE_KERNELS_VLLM",
            "off",
            set(),
            "EAGLE_KERNELS_VLLM is 'off', expected one of ('auto', '0', '1', 'force'); read as 0",
            id="plugin",
        ),
        pytest.param(
            "EAGLE_KERNELS_VLLM_COMBINE",
            "force",
            set(),
            "EAGLE_KERNELS_VLLM_COMBINE is 'force', expected one of ('auto', '0', '1'); read as 0",
            id="part",
        ),
        pytest.param(
            "EAGLE_KERNELS_VLLM_COMBINED",
            "0",
            {"combine"},
            "EAGLE_KERNELS_VLLM_COMBINED is not a variable of the plugin and changes nothing, "
            "did you mean EAGLE_KERNELS_VLLM_COMBINE?",
            id="misspelt",
        ),
        pytest.param(
            "EAGLE_KERNELS_VLLMEMBEDDING",
            "1",
            {"combine"},
            "EAGLE_KERNELS_VLLMEMBEDDING is not a variable of the plugin and changes nothing, "
            "did you mean EAGLE_KERNELS_VLLM_EMBEDDING?",
            id="without-underscore",
        ),
    ],
)
def test_a_wrong_switch_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, on: set[str], sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    assert environment.engine_switches("vllm", PARTS) == environment.EngineSwitches(frozenset(on), False, (sentence,))


@pytest.mark.parametrize(
    ("linear", "unsupported"),
    [
        pytest.param(EngineLinear(Unquantized()), None, id="engine"),
        pytest.param(nn.Linear(K * H, D, bias=False).bfloat16(), None, id="torch"),
        pytest.param(EngineLinear(Fp8()), "its quant_method is Fp8", id="quantized"),
        pytest.param(EngineLinear(Unquantized(), bias=parameter(D)), "it has a bias", id="bias"),
        pytest.param(nn.Linear(K * H, D), "it has a bias", id="torch-bias"),
        pytest.param(EngineLinear(Unquantized(), base_layer=nn.Identity()), "LoRA wraps it (EngineLinear)", id="lora"),
        pytest.param(
            EngineLinear(Unquantized(), weight=parameter(0)),
            "its weight is packed for the engine's own CPU product",
            id="packed",
        ),
        pytest.param(
            EngineLinear(Unquantized(), weight=parameter(D, K * H, dtype=torch.float64)),
            "its weight is torch.float64",
            id="dtype",
        ),
        pytest.param(
            EngineLinear(Unquantized(), weight=parameter(D, K * H // 2)),
            "its weight is a shard or a repacked copy: (5, 12) of (5, 24)",
            id="sharded",
        ),
        pytest.param(
            EngineLinear(Unquantized(), weight=nn.Parameter(torch.zeros(K * H, D).t(), requires_grad=False)),
            "its weight has strides (1, 5)",
            id="transposed",
        ),
    ],
)
def test_linear_unsupported_reason(linear: nn.Module, unsupported: str | None) -> None:
    assert eligibility.linear_unsupported_reason(linear, {Unquantized}) == unsupported


def test_a_bias_is_supported_by_an_op_that_takes_one() -> None:
    assert eligibility.linear_unsupported_reason(nn.Linear(K * H, D), bias=True) is None


def test_norm_unsupported_reason() -> None:
    class OtherPluginsNorm(nn.RMSNorm):
        pass

    def unsupported(norm: nn.Module) -> str | None:
        return eligibility.norm_unsupported_reason(norm, {nn.RMSNorm}, torch.bfloat16)

    assert unsupported(nn.RMSNorm(H, dtype=torch.bfloat16)) is None
    assert unsupported(nn.RMSNorm(H)) is None  # fp32 gains
    assert unsupported(nn.RMSNorm(H, dtype=torch.float16)) == (
        "its norm's weight is torch.float16, and the layer is torch.bfloat16"
    )
    assert unsupported(nn.RMSNorm(H, elementwise_affine=False)) == "its norm has no weight"
    assert "OtherPluginsNorm" in unsupported(OtherPluginsNorm(H))
    of_engine = nn.RMSNorm(H, dtype=torch.bfloat16)
    of_engine.variance_size_override, of_engine.has_weight = None, True
    assert unsupported(of_engine) is None
    of_engine.has_weight = False
    assert unsupported(of_engine) == "its norm has no weight"
    of_engine.variance_size_override = 8
    assert unsupported(of_engine) == "its norm takes the variance of 8 columns only"


def test_each_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("engine")
    eligibility.clear_logged()
    for message in ("fc stays: LoRA", "fc stays: LoRA", "fc stays: bias"):
        eligibility.log_once(logger, logging.WARNING, message)
    assert [record.getMessage() for record in caplog.records] == [
        "eagle_kernels: fc stays: LoRA",
        "eagle_kernels: fc stays: bias",
    ]
