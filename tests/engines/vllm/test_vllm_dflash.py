"""A DFlash drafter in the real vLLM: its drafts are right only where K and V of its context are (`dflash_drafter`).

From captured layers to accepted tokens vLLM's own code runs, on a CPU: proposer, cache, non-causal attention, head.
"""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

from test_vllm_engine import BEST, FIGURES
from vllm_checkpoints import fp8_config, write_dflash_drafter, write_target
from vllm_engine import EXPECTED, Engine

from engines.quantized_layers import AWQ, W4A16

STORE = "DFlashQwen3Model.precompute_and_store_context_kv"
RUNS = f"{STORE} runs norm_concat_linear and store_context_kv"
LAYER_BY_LAYER = (
    "DFlashQwen3Model norms the keys of its context layer by layer: vLLM's norm has one gain for all layers"
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("dflash"))


def request_of(
    engine: Engine, one_gain: bool = False, layout: str | None = None, quantization: dict | None = None, **more: object
) -> dict:
    folder: Path = engine.folder / f"drafter-{one_gain}-{layout}-{quantization is not None}"
    config = {} if quantization is None else {"quantization_config": quantization}
    drafter = write_dflash_drafter(folder, one_gain, layout, **config)
    return {"target": write_target(engine.folder / "target"), "drafter": drafter, "method": "dflash", **more}


@pytest.mark.parametrize("tp", [1, 2])
def test_same_tokens_with_and_without(engine: Engine, tp: int) -> None:
    request = request_of(engine, one_gain=True, tp=tp)
    off = engine.run(request, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request)
    assert on.tokens == off.tokens == EXPECTED
    assert on.accepted_length == off.accepted_length == BEST
    assert off.calls == [] and f"{RUNS}; forced, not timed" in on.lines
    assert len(on.calls) == tp
    # Two layers in each of five steps.
    assert all(calls["store_context_kv"] >= 10 and calls["norm_concat_linear"] >= 5 for calls in on.calls)


@pytest.mark.parametrize("switch", ["force", "1"])
def test_each_layer_norms_its_keys_with_its_own_gain(engine: Engine, switch: str) -> None:
    """vLLM's norm on a CPU takes a gain for each layer but reads only the first (vllm#56431 is that on XPU): without
    the plugin layer 1 of this drafter attends away from every key that it should attend to."""
    off = engine.run(request_of(engine), EAGLE_KERNELS_VLLM="0")
    on = engine.run(request_of(engine), EAGLE_KERNELS_VLLM=switch)
    assert on.tokens == off.tokens == EXPECTED
    assert on.accepted_length == BEST and off.accepted_length < 2
    assert any(line.startswith(LAYER_BY_LAYER) for line in on.lines)
    (line,) = [line for line in on.lines if line.startswith(STORE)]
    timed = rf"{STORE} (runs |stays with vLLM: )norm_concat_linear and store_context_kv.*{FIGURES}"
    assert re.fullmatch(f"{RUNS}; forced, not timed" if switch == "force" else timed, line)


@pytest.mark.parametrize("layout", ["hf-block", "modelopt-nvfp4", W4A16, AWQ])
def test_a_quantized_fc_is_loaded_with_its_scale(engine: Engine, layout: str) -> None:
    """DFlash2-W4A16 and others, where the config says nothing of fc."""
    run = engine.run(request_of(engine, one_gain=True, layout=layout))
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert len([line for line in run.lines if "the engine's layer has no scales" in line]) == 1


def test_a_quantized_fc_without_the_plugin(engine: Engine) -> None:
    run = engine.run(request_of(engine, one_gain=True, layout="hf-block"), may_fail=True, EAGLE_KERNELS_VLLM_SCALES="0")
    missing = "The available parameters belonging to fc (ReplicatedLinear) are: {'fc.weight'}"
    assert run.returncode != 0 and missing in run.log


def test_an_fc_that_vllm_holds_as_fp8(engine: Engine) -> None:
    """The op reads vLLM's own codes."""
    run = engine.run(request_of(engine, one_gain=True, layout="compressed-row", quantization=fp8_config("fc")))
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    runs = "DFlashQwen3ForCausalLM.combine_hidden_states runs norm_concat_linear (no norm, fp8_row)"
    assert f"{runs}; forced, not timed" in run.lines
    assert all(calls["norm_concat_linear_quantized"] >= 5 for calls in run.calls)


MISTAKE = """
def register():
    from eagle_kernels.engines.projection import EngineProjection
    from eagle_kernels.engines.vllm import context
    context.Context.probe = lambda self: None  # it would find the mistake, and leave the stage to vLLM
    own, store, calls = context.Context.keys_and_values, context.store_context_kv, []
{body}
"""
OFF_BY_ONE = """
    context.Context.keys_and_values = lambda self, states, positions: own(self, states, positions + 1)
"""
NO_HIDDEN_NORM = """
    def keys_and_values(self, states, positions):
        self.projection = EngineProjection(self.projection.fc, 1)
        return own(self, states, positions)
    context.Context.keys_and_values = keys_and_values
"""
NO_KEY_NORM = """
    context.store_context_kv = lambda record: store(record._replace(norm_width=0, k_norm_weight=None))
"""
GAIN_OF_LAYER_0 = """
    def of_layer_0(record):
        calls.append(record.k_norm_weight)
        store(record._replace(k_norm_weight=calls[-1 - (len(calls) - 1) % 2]))
    context.store_context_kv = of_layer_0
"""
NO_ROTATION = """
    context.store_context_kv = lambda record: store(record._replace(positions=0 * record.positions))
"""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(OFF_BY_ONE, id="position-off-by-one"),
        pytest.param(NO_HIDDEN_NORM, id="no-hidden-norm"),
        pytest.param(NO_KEY_NORM, id="no-key-norm"),
        pytest.param(GAIN_OF_LAYER_0, id="gain-of-layer-0"),
        pytest.param(NO_ROTATION, id="no-rotation"),
    ],
)
def test_a_mistake_loses_drafts(engine: Engine, body: str) -> None:
    run = engine.run(request_of(engine), plugins={"a_mistake": MISTAKE.format(body=body)})
    assert run.tokens == EXPECTED and run.calls[0]["store_context_kv"] >= 10
    assert run.accepted_length < 2, run.accepted_length


def test_a_mistake_is_found_when_it_is_loaded(engine: Engine) -> None:
    body = MISTAKE.format(body=OFF_BY_ONE).replace("context.Context.probe", "_")
    run = engine.run(request_of(engine), plugins={"another_mistake": body})
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    keys = f"the norm and rotation of keys in {STORE} stays with vLLM: norm_concat_linear and store_context_kv "
    assert [line for line in run.lines if line.startswith(f"{keys}give other values than vLLM: ")]
    assert "DFlashQwen3Model._project_context_kv runs norm_concat_linear; forced, not timed" in run.lines
