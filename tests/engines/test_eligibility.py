"""The questions every engine plugin asks: switches, versions, targets, layers, and each answer logged once."""

import logging
import re
import sys
import types

import pytest
import torch
from torch import nn

from eagle_kernels import environment
from eagle_kernels.engines import eligibility

PARTS = {"combine": True, "embedding": False}
K, H, D = 3, 8, 5


class Unquantized:
    """Stands for an engine's linear method that leaves the weight as it is."""


class Fp8(Unquantized):
    """A subclass may repack the weight: only the exact type is known."""


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
    assert environment.engine_parts("vllm", PARTS) == on


def test_a_switch_that_is_neither_0_nor_1_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_VLLM_COMBINE", "off")
    with pytest.raises(ValueError, match="EAGLE_KERNELS_VLLM_COMBINE is 'off'"):
        environment.engine_parts("vllm", PARTS)


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.31.4", False),
        ("0.32.0", True),
        ("0.33.1.dev3+g1234", True),
        ("0.34.0", False),
        ("1.0", False),
        ("dev", False),
    ],
)
def test_versions(version: str, known: bool) -> None:
    unsupported = eligibility.version_unsupported_reason("vLLM", version, "0.32", "0.33")
    assert (unsupported is None) == known
    assert known or unsupported == f"vLLM {version} is none of the versions the hooks were written for, 0.32 to 0.33"


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    class Drafter:
        def combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    module = types.ModuleType("engine_with_hooks")
    module.Drafter = Drafter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_parameters_may_go_on(engine_module: types.ModuleType) -> None:
    eligibility.find_target("engine_with_hooks:Drafter.combine", ["self", ...])
    with pytest.raises(eligibility.TargetError, match="takes"):
        eligibility.find_target("engine_with_hooks:Drafter.combine", ["self", "aux", ...])


def test_a_target_is_found(engine_module: types.ModuleType) -> None:
    owner, name, value = eligibility.find_target("engine_with_hooks:Drafter.combine", ["self", "hidden_states"])
    assert (owner, name, value) == (engine_module.Drafter, "combine", engine_module.Drafter.combine)


@pytest.mark.parametrize(
    ("target", "parameters", "message"),
    [
        pytest.param(
            "engine_without:Drafter.combine", None, "engine_without:Drafter.combine is not there", id="module"
        ),
        pytest.param("engine_with_hooks:Draft.combine", None, "engine_with_hooks:Draft.combine is not", id="class"),
        pytest.param("engine_with_hooks:Drafter.merge", None, "engine_with_hooks:Drafter.merge is not", id="method"),
        pytest.param(
            "engine_with_hooks:Drafter.combine",
            ["self", "aux"],
            "engine_with_hooks:Drafter.combine takes ['self', 'hidden_states'], and the hook was written for",
            id="parameters",
        ),
    ],
)
def test_a_target_that_changed_is_named(
    engine_module: types.ModuleType, target: str, parameters: list[str] | None, message: str
) -> None:
    with pytest.raises(eligibility.TargetError, match=re.escape(message)):
        eligibility.find_target(target, parameters)


@pytest.mark.parametrize(
    ("linear", "unsupported"),
    [
        pytest.param(EngineLinear(Unquantized()), None, id="engine"),
        pytest.param(nn.Linear(K * H, D, bias=False).bfloat16(), None, id="torch"),
        pytest.param(EngineLinear(Fp8()), "its quant_method is Fp8", id="quantised"),
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


def test_each_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("engine")
    eligibility.clear_logged()
    for message in ("fc stays: LoRA", "fc stays: LoRA", "fc stays: bias"):
        eligibility.log_once(logger, logging.WARNING, message)
    assert [record.getMessage() for record in caplog.records] == [
        "eagle_kernels: fc stays: LoRA",
        "eagle_kernels: fc stays: bias",
    ]
