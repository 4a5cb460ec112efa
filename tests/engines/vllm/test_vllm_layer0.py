"""Layer 0 of EAGLE-3 drafters in the real vLLM: their drafts are right only where that layer is (`layer0_drafter`)."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

from test_vllm_engine import BEST, FIGURES, WORST
from vllm_checkpoints import (
    write_counting_deepseek,
    write_gpt_oss_target,
    write_latent_drafter,
    write_layer0_drafter,
    write_target,
)
from vllm_engine import EXPECTED, Engine, Run

LAYER = "LlamaDecoderLayer.qkv_proj"
ON = {"EAGLE_KERNELS_VLLM_LAYER0": "1"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("layer0"))


def request_of(engine: Engine, norm_before_residual: bool = False, **more: object) -> dict:
    folder: Path = engine.folder / f"drafter-{norm_before_residual}"
    drafter = write_layer0_drafter(folder, norm_before_residual=norm_before_residual)
    return {"target": write_target(engine.folder / "target"), "drafter": drafter, **more}


def run_without_and_with(engine: Engine, request: dict, layer: str) -> Run:
    """The run with it, after one without: a graph that was cached without the part must not run with it."""
    off = engine.run(request, EAGLE_KERNELS_VLLM_LAYER0="0")
    on = engine.run(request, **ON)
    assert on.tokens == off.tokens == EXPECTED
    assert on.accepted_length == off.accepted_length == BEST
    assert off.calls == [] and f"{layer} runs norm_concat_linear; forced, not timed" in on.lines
    return on


FORMS = pytest.mark.parametrize(
    ("norm_before_residual", "tp", "compiled"),
    [
        pytest.param(False, 1, False, id="eager"),
        pytest.param(True, 1, False, id="norm-before-residual"),
        pytest.param(False, 2, False, id="tp2"),
        pytest.param(True, 1, True, id="compiled-norm-before-residual"),
    ],
)


@FORMS
def test_same_tokens_with_and_without(engine: Engine, norm_before_residual: bool, tp: int, compiled: bool) -> None:
    request = request_of(engine, norm_before_residual, tp=tp, compiled=compiled)
    on = run_without_and_with(engine, request, LAYER)
    assert len(on.calls) == tp
    # Each step drafts three tokens.
    assert all(set(calls) == {"norm_concat_linear"} and calls["norm_concat_linear"] >= 15 for calls in on.calls)


def test_of_a_gpt_oss_target(engine: Engine) -> None:
    """Its drafter is a Llama's. The first capture comes after a layer with sinks and a sliding window."""
    request = request_of(engine) | {"target": write_gpt_oss_target(engine.folder / "gpt-oss")}
    on = run_without_and_with(engine, request, LAYER)
    assert [set(calls) for calls in on.calls] == [{"norm_concat_linear"}]


def test_of_a_qwen3_drafter(engine: Engine) -> None:
    """Its layer has a class of its own, whose attention norms queries and keys."""
    architecture = "Eagle3Qwen3ForCausalLM"
    drafter = write_layer0_drafter(engine.folder / "qwen3", norm_before_residual=True, architecture=architecture)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    on = run_without_and_with(engine, request, "Qwen3Eagle3DecoderLayer.qkv_proj")
    assert [set(calls) for calls in on.calls] == [{"norm_concat_linear"}]


def latent_request_of(engine: Engine, norm_before_residual: bool, **more: object) -> dict:
    """On a CPU vLLM has no block size that fits a target without latent attention and a drafter with it."""
    folder = engine.folder / f"latent-{norm_before_residual}"
    drafter = write_latent_drafter(folder, norm_before_residual=norm_before_residual)
    target = write_counting_deepseek(engine.folder / "deepseek", None, layers=3)
    return {"target": target, "drafter": drafter, **more}


@FORMS
def test_with_latent_attention(engine: Engine, norm_before_residual: bool, tp: int, compiled: bool) -> None:
    """Every rank has the whole projection: its rows belong to no head."""
    request = latent_request_of(engine, norm_before_residual, tp=tp, compiled=compiled)
    on = run_without_and_with(engine, request, "DeepseekV2Eagle3DecoderLayer.fused_qkv_a_proj")
    assert [calls["norm_concat_linear"] >= 15 for calls in on.calls] == [True] * tp


def test_weight_updates_take_effect(engine: Engine) -> None:
    """No gain comes from a stale copy: each update that breaks the layer is followed by one that repairs it."""
    layer = "layers.0."
    names = (f"{layer}hidden_norm.weight", f"{layer}input_layernorm.weight")
    updates = [{name: (-1.0, 0)} for name in names for _ in range(2)]
    run = engine.run(request_of(engine, updates=updates), **ON)
    assert [result["tokens"] for result in run.results] == [EXPECTED] * 5
    assert [result["accepted_length"] for result in run.results] == [BEST, WORST, BEST, WORST, BEST]


SWAPPED = """
def register():
    import torch
    from eagle_kernels.engines.vllm import normed_linear
    own = normed_linear.NormedLinear.forward
    normed_linear.NormedLinear.forward = lambda self, x: own(self, torch.cat(x.chunk(2, -1)[::-1], -1))
"""
RAW_RESIDUAL = """
def register():
    from eagle_kernels.engines.vllm import layer0
    layer0._normed_residual = lambda layer, hidden_states: (hidden_states, hidden_states)
"""


@pytest.mark.parametrize(
    "mistake", [pytest.param(SWAPPED, id="swapped"), pytest.param(RAW_RESIDUAL, id="raw-residual")]
)
@pytest.mark.parametrize("attention", [request_of, latent_request_of], ids=["llama", "latent"])
def test_a_mistake_loses_every_draft(engine: Engine, attention: Callable, mistake: str) -> None:
    run = engine.run(attention(engine, True), plugins={"a_mistake": mistake}, **ON)
    assert (run.tokens, run.accepted_length) == (EXPECTED, WORST)


def test_it_is_timed_when_it_is_loaded(engine: Engine) -> None:
    run = engine.run(request_of(engine, tp=2), **ON, EAGLE_KERNELS_VLLM="1")
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    (line,) = [line for line in run.lines if line.startswith(LAYER)]
    decided = r"runs norm_concat_linear; |stays with vLLM: norm_concat_linear is not faster at all row counts, "
    assert re.fullmatch(rf"{LAYER} ({decided}){FIGURES}", line)


def test_it_stays_with_vllm_on_a_backend_that_does_not_run_here(engine: Engine) -> None:
    run = engine.run(request_of(engine), **ON, EAGLE_KERNELS_BACKEND="triton")
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    # vLLM packs the weight where the CPU has AVX-512; it is looked at before the backend.
    reasons = "its weight is packed for the engine's own", "norm_concat_linear: EAGLE_KERNELS_BACKEND is 'triton', "
    assert [line for line in run.lines if line.startswith(tuple(f"{LAYER} stays with vLLM: {it}" for it in reasons))]
