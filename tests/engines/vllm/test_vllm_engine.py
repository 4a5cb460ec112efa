"""The plugin in the real engine, on CPU: the same tokens and the same acceptance with it and without, and proof that
the ops ran. `make test-vllm` runs this in an environment of its own; without vLLM there is nothing to test."""

import re
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

from vllm_checkpoints import fp8_config, write_counting_deepseek, write_deepseek, write_drafter, write_target
from vllm_engine import EXPECTED, Engine

from backends import needs_packing
from engines.quantized_layers import AUTO_AWQ, AUTO_GPTQ, AWQ, GPTQ, W4A16, config_of

COMBINE = "Eagle3LlamaForCausalLM.combine_hidden_states"
RUNS = f"{COMBINE} runs norm_concat_linear"
# The best accepted length: 3 draft tokens and the target's own. At 1 no draft token was right.
BEST, WORST = 4.0, 1.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"))


def request_of(engine: Engine, K: int, norm: str, **more: object) -> dict:
    drafter = write_drafter(engine.folder / f"drafter-{K}-{norm}", K, norm)
    return {"target": write_target(engine.folder / "target"), "drafter": drafter, **more}


# Compiling takes most of a minute on an idle machine, and the projection is outside the compiled part: two compiled
# cases cover every value of K, norm and tp.
CASES = [(K, norm, tp, False) for K in (3, 4) for norm in ("chunk", "concat") for tp in (1, 2)]
CASES += [(3, "chunk", 1, True), (4, "concat", 2, True)]


@pytest.mark.parametrize(
    ("K", "norm", "tp", "compiled"),
    [pytest.param(*case, id="K{}-{}-tp{}-{}".format(*case[:3], "compiled" if case[3] else "eager")) for case in CASES],
)
def test_same_tokens_with_and_without(engine: Engine, K: int, norm: str, tp: int, compiled: bool) -> None:
    request = request_of(engine, K, norm, tp=tp, compiled=compiled)
    off = engine.run(request, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request)
    assert on.tokens == off.tokens == EXPECTED
    assert on.accepted_length == off.accepted_length == BEST
    assert off.calls == [] and off.lines == []
    assert on.lines == [f"{RUNS} (K={K}, {norm} norm); forced, not timed"]
    assert len(on.calls) == tp
    for calls in on.calls:
        assert set(calls) == {"norm_concat_linear"} and calls["norm_concat_linear"] >= 6


LONG, SIX = [list(range(40))], [list(range(n, 2 * n)) for n in range(3, 9)]
SHARED = [[*range(48), 48 + n] for n in range(3)]
# (K, norm, more of the drafter), more of the request, environment.
HELD_OUT = {
    "K1-odd-vocabulary-chunked-prefill": (
        (1, "chunk", {"vocabulary": 131}),
        {"prompts": LONG, "engine": {"max_num_batched_tokens": 16}},
        {},
    ),
    "K2-d2t-prefix-caching": (
        (2, "concat", {"draft_vocabulary": 101}),
        {"prompts": SHARED, "engine": {"enable_prefix_caching": True}, "updates": [{}]},
        {},
    ),
    "K5-six-requests": ((5, "chunk", {}), {"prompts": SIX, "engine": {"max_num_seqs": 6}}, {}),
    "K6-norm-output-tp3": ((6, "chunk", {"norm_output": True}), {"tp": 3}, {}),
    "K7-odd-vocabulary-tp2-row-parallel": (
        (7, "concat", {"vocabulary": 173, "draft_vocabulary": 99}),
        {"tp": 2, "num_speculative_tokens": 5},
        {"EAGLE_KERNELS_VLLM_ROW_PARALLEL": "1"},
    ),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_nothing_changes_where_users_go(engine: Engine, name: str) -> None:
    (K, norm, drafter), request, environment = HELD_OUT[name]
    folder, sizes = engine.folder / name, {"layers": 7}
    target = write_target(folder / "target", drafter.get("vocabulary", 192), **sizes)
    request = {"target": target, "drafter": write_drafter(folder / "drafter", K, norm, **drafter, **sizes)} | request
    off = engine.run(request, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request, **environment)
    assert on.results == off.results
    assert on.accepted_length == 1 + request.get("num_speculative_tokens", 3)
    # A row-parallel rank norms all columns and multiplies its own.
    is_row_parallel = "EAGLE_KERNELS_VLLM_ROW_PARALLEL" in environment
    ops = {"norm_concat", "norm_concat_linear"} if is_row_parallel else {"norm_concat_linear"}
    assert [set(calls) for calls in on.calls] == [ops] * request.get("tp", 1)


# On a CPU vLLM 0.32 expands temperatures to one per draft with a C++ function for int64, which writes to a copy of the
# output that is then dropped: the temperatures are uninitialized memory, and one seed draws other tokens each time.
EXPANDED = """
def register():
    from vllm.v1.sample import rejection_sampler

    def expanded(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.where(x != replace_from, replace_to).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expanded
"""


def test_a_seed_draws_the_same_tokens(engine: Engine) -> None:
    request = request_of(engine, 3, "chunk") | {"sampling": {"temperature": 2.0, "seed": 7}, "prompts": SIX}
    request |= {"engine": {"max_num_seqs": 6}, "updates": [{}]}
    off = engine.run(request, plugins={"expanded": EXPANDED}, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request, plugins={"expanded": EXPANDED})
    assert off.results[0] == off.results[1] and 1 < off.accepted_length < BEST
    assert on.results == off.results and on.calls


def test_engine_core_in_a_process_of_its_own(engine: Engine) -> None:
    """vLLM's default, with the plugin loaded in both processes; the other runs have the core in the main process."""
    run = engine.run(request_of(engine, 3, "chunk"), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert run.lines == [f"{RUNS} (K=3, chunk norm); forced, not timed"]
    assert [set(calls) for calls in run.calls] == [{"norm_concat_linear"}]


def test_weight_updates_take_effect(engine: Engine) -> None:
    """Each update that breaks the drafter is followed by one that repairs it, so no weight comes from a stale copy. The
    updates are negative controls too: acceptance depends on the projection's output."""
    negated_gains = {f"fc_norm.{k}.weight": (-1.0, 0) for k in range(3)}
    updates = [negated_gains, {"fc.weight": (-1.0, 0)}, {"fc.weight": (1.0, 5)}, {"fc.weight": (1.0, -5)}]
    run = engine.run(request_of(engine, 3, "chunk", updates=updates))
    assert [result["tokens"] for result in run.results] == [EXPECTED] * 5
    # With a negated hidden state one draft token is still right: silu lets a trace of it through to the next column.
    assert [result["accepted_length"] for result in run.results] == [BEST, 2.0, BEST, WORST, BEST]


def test_packed_fc_stays_with_the_engine_behind_the_norms(engine: Engine) -> None:
    """Where the fused kernel would be slower, vLLM packs fc, and the norms and their cat run on norm_concat."""
    run = engine.run(request_of(engine, 3, "chunk"), EAGLE_KERNELS_CPU_ISA="scalar")
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert run.lines == [
        "Eagle3LlamaForCausalLM.combine_hidden_states runs norm_concat (K=3, chunk norm), its fc stays with vLLM: "
        "its weight is packed for vLLM's own CPU product; forced, not timed"
    ]
    assert [set(calls) for calls in run.calls] == [{"norm_concat"}]


@needs_packing
@pytest.mark.parametrize("switch", ["1", "force"])
def test_no_norm_and_a_packed_input_leave_nothing_to_fuse(engine: Engine, switch: str) -> None:
    run = engine.run(request_of(engine, 3, "none"), EAGLE_KERNELS_VLLM=switch)
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    reason = "it has no norm, and its fc is vLLM's: its weight is packed for the engine's own CPU product"
    assert run.lines == [f"{COMBINE} stays with vLLM: {reason}"]


FIGURES = r"T=1 \S+ ms \(vLLM \S+\), T=4 .*, T=16 .*, T=64 .*, T=256 .*, T=\d+ \S+ ms \(vLLM \S+\)"


@pytest.mark.parametrize(("norm", "tp"), [("chunk", 1), ("concat", 2)])
def test_a_stage_is_timed_when_it_is_loaded(engine: Engine, norm: str, tp: int) -> None:
    """The decision depends on the machine; that all ranks make the same one, and the tokens, do not."""
    run = engine.run(request_of(engine, 3, norm, tp=tp), EAGLE_KERNELS_VLLM="1")
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    (line,) = run.lines
    sizes = rf"\(K=3, {norm} norm\)"
    packed = "its fc stays with vLLM: its weight is packed for vLLM's own CPU product"
    whole, in_front = f"norm_concat_linear {sizes}", f"norm_concat {sizes}( where it is faster)?, {packed}"
    decided = rf"runs ({whole}( where it is faster)?|{in_front}); |stays with vLLM: norm_concat {sizes} is not faster, "
    copied = rf"{whole} on a dense copy|norm_concat_linear {sizes[:-2]}, bf16_12bit\) on an exact copy in 12 bits"
    both = rf"runs ({copied}) of its weight \(.* MB\) where that is faster than the packed one, .* else "
    assert re.fullmatch(rf"{COMBINE} ({both})?({decided}){FIGURES}", line)


BROKEN_LIBRARY = """
def register():
    from eagle_kernels import library
    library.unsupported_reason = "libeagle_kernels.so did not load: a symbol is missing"
"""


@pytest.mark.parametrize(
    ("env", "plugins", "because"),
    [
        pytest.param(
            {"EAGLE_KERNELS_BACKEND": "triton"}, {}, "EAGLE_KERNELS_BACKEND is 'triton', expected one of", id="refused"
        ),
        pytest.param(
            {},
            {"breaking_plugin": BROKEN_LIBRARY},
            "there are no kernels of ours for it, cpu: libeagle_kernels.so did not load: a symbol is missing; `pip",
            id="broken-library",
        ),
    ],
)
def test_without_kernels_the_engine_runs_on(
    engine: Engine, env: dict[str, str], plugins: dict[str, str], because: str
) -> None:
    run = engine.run(request_of(engine, 3, "chunk"), plugins=plugins, **env)
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    (line,) = run.lines
    assert because in line and line.startswith(f"{COMBINE} stays with vLLM: ")


@pytest.mark.parametrize(
    ("env", "lines"),
    [
        pytest.param({"EAGLE_KERNELS_VLLM_COMBINE": "0", "EAGLE_KERNELS_VLLM_ZERO_COPY": "0"}, [], id="part-off"),
        pytest.param({"VLLM_PLUGINS": "vllm_calls"}, [], id="not-among-VLLM_PLUGINS"),
        pytest.param(
            {"EAGLE_KERNELS_VLLM": "yes"},
            ["EAGLE_KERNELS_VLLM is 'yes', expected one of ('auto', '0', '1', 'force'); read as 0"],
            id="garbage",
        ),
    ],
)  # fmt: skip
def test_switched_off(engine: Engine, env: dict[str, str], lines: list[str]) -> None:
    run = engine.run(request_of(engine, 3, "chunk"), **env)
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    assert run.lines == lines


OTHER_PLUGIN = """
import torch

def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("LlamaForCausalLMEagle3", "{module}:Theirs")

def __getattr__(name):
    if name != "Theirs":
        raise AttributeError(name)
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    class Theirs(Eagle3LlamaForCausalLM):
{body}
    Theirs.__module__, Theirs.__qualname__ = "{module}", "Theirs"
    globals()["Theirs"] = Theirs
    return Theirs
"""
OVERRIDES = """
        def combine_hidden_states(self, hidden_states):
            print("THEIRS RAN", flush=True)
            return super().combine_hidden_states(hidden_states)
"""


def test_another_plugins_method_is_left_alone(engine: Engine) -> None:
    """Its name sorts before or after ours, so either may register first: their method runs, ours does not."""
    source = OTHER_PLUGIN.format(module="another_plugin", body=OVERRIDES)
    run = engine.run(request_of(engine, 3, "chunk"), plugins={"another_plugin": source})
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    assert "THEIRS RAN" in run.log
    assert run.lines in (
        [],  # theirs was registered after ours, and replaced it
        ["another_plugin.Theirs stays with vLLM: combine_hidden_states is that of another_plugin, not vLLM's own"],
    )


def test_plugins_that_fail_take_nobody_down(engine: Engine) -> None:
    """An import error of another plugin leaves ours on; vLLM itself catches it, and would catch one of ours."""
    run = engine.run(request_of(engine, 3, "chunk"), plugins={"broken_plugin": "import module_that_is_not_there"})
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert "Failed to load plugin broken_plugin" in run.log
    assert run.lines == [f"{RUNS} (K=3, chunk norm); forced, not timed"]


RENAMES = """
def register():
    from vllm.model_executor.models import registry
    original = registry._LazyRegisteredModel.load_model_cls
    def load_model_cls(self):
        loaded = original(self)
        if loaded.__name__ == "Eagle3LlamaForCausalLM" and "combine_hidden_states" in vars(loaded):
            method = loaded.combine_hidden_states
            def combine_hidden_states(self, hidden_states, scale=1.0):
                return method(self, hidden_states)
            combine_hidden_states.__module__ = method.__module__
            loaded.combine_hidden_states = combine_hidden_states
        return loaded
    registry._LazyRegisteredModel.load_model_cls = load_model_cls
"""


def test_a_changed_target_is_named_and_left_alone(engine: Engine) -> None:
    run = engine.run(request_of(engine, 3, "chunk"), plugins={"changing_plugin": RENAMES})
    assert (run.tokens, run.accepted_length, run.calls) == (EXPECTED, BEST, [])
    (line,) = run.lines
    home = "vllm.model_executor.models.llama_eagle3"
    assert line.startswith(f"{home}.Eagle3LlamaForCausalLM stays with vLLM: {home}:{COMBINE} takes")
    assert "takes ['self', 'hidden_states', 'scale']" in line


def test_chunk_count_of_the_top_level_layer_ids(engine: Engine) -> None:
    """vllm#54526: a Llama drafter's fc is sized for 3 chunks where only the top-level layer ids say 4, as the
    speculators format writes them, and the engine dies loading it. With the plugin it is sized for 4."""
    folder: Path = engine.folder / "drafter-ids-only"
    drafter = write_drafter(folder, 4, "chunk", num_aux_hidden_states=None)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    assert engine.run(request, may_fail=True, EAGLE_KERNELS_VLLM="0").returncode != 0
    on = engine.run(request)
    assert (on.tokens, on.accepted_length) == (EXPECTED, BEST)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_embedding_shards(engine: Engine, compiled: bool) -> None:
    """Off by default. The compiled case runs after graphs of the same model were cached without the part: the switch is
    part of the cache's key, else one of the two would run the other's graph."""
    request = request_of(engine, 4, "concat", tp=2, compiled=compiled)
    on = engine.run(request, EAGLE_KERNELS_VLLM_EMBEDDING="1")
    assert (on.tokens, on.accepted_length) == (EXPECTED, BEST)
    assert len(on.calls) == 2 and all(calls["vocab_parallel_embedding"] >= 6 for calls in on.calls)
    assert "VocabParallelEmbedding 192 x 192 runs vocab_parallel_embedding" in on.lines
    again = engine.run(request)
    assert (again.tokens, [set(calls) for calls in again.calls]) == (EXPECTED, [{"norm_concat_linear"}] * 2)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_deepseek_mtp(engine: Engine, compiled: bool) -> None:
    """Off first: a compiled graph that was cached without the plugin must not run with it."""
    target = write_deepseek(engine.folder / "deepseek")
    request = {"target": target, "method": "mtp", "load_format": "dummy", "num_speculative_tokens": 1}
    off = engine.run(request | {"compiled": compiled}, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request | {"compiled": compiled})
    assert on.tokens == off.tokens and off.calls == []
    assert on.lines == ["DeepSeekMultiTokenPredictorLayer.eh_proj runs norm_concat_linear; forced, not timed"]
    assert [set(calls) for calls in on.calls] == [{"norm_concat_linear"}]


# Model-Optimizer, LongCat's and Hugging Face's blocks, compressed-tensors, Quark (GLM-5-MXFP4), Hy3, DFlash2-W4A16,
# Mistral.
LAYOUTS = ("modelopt-fp8", "hf-block", "compressed-int8", "quark-mxfp4", "modelopt-nvfp4", W4A16, "mistral")


def mtp_request(engine: Engine, layout: str | None) -> dict:
    target = write_counting_deepseek(engine.folder / f"counting-deepseek-{layout}", layout)
    return {"target": target, "method": "mtp", "num_speculative_tokens": 3}


# DeepSeek V4's scales are rounded to powers of two under the codes: fc then has other weights, and 3.0 are accepted.
@pytest.mark.parametrize("layout", [None, *LAYOUTS, "deepseek-block"])
def test_a_quantized_eh_proj_is_loaded_with_its_scale(engine: Engine, layout: str | None) -> None:
    """vLLM's MTP layers have a plain nn.Linear for it."""
    run = engine.run(mtp_request(engine, layout))
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    loaded = [line for line in run.lines if "the engine's layer has no scales" in line]
    assert len(loaded) == (layout is not None)
    assert [set(calls) for calls in run.calls] == [{"norm_concat_linear"}]


def test_a_quantized_eh_proj_without_the_plugin(engine: Engine) -> None:
    run = engine.run(mtp_request(engine, "hf-block"), may_fail=True, EAGLE_KERNELS_VLLM_SCALES="0")
    assert run.returncode != 0 and "KeyError: 'model.layers.2.eh_proj.weight_scale_inv'" in run.log


def test_an_fc_that_vllm_holds_as_fp8(engine: Engine) -> None:
    """The op reads vLLM's own codes."""
    folder = engine.folder / "drafter-held-fp8"
    drafter = write_drafter(folder, 3, "chunk", "compressed-row", quantization_config=fp8_config("fc"))
    run = engine.run({"target": write_target(engine.folder / "target"), "drafter": drafter})
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert f"{RUNS} (K=3, chunk norm, fp8_row); forced, not timed" in run.lines
    assert [set(calls) for calls in run.calls] == [{"norm_concat_linear_quantized"}]


# Where the config lists no layers vLLM 0.32 reads them from the file's header: GPTQ's, which are those in codes, and
# those that are not AWQ's, by names that the decoder layer has in the file alone. auto-round's config lists its blocks.
ONLY_FC = {GPTQ: {}, AWQ: {"modules_to_not_convert": ["layers.", "lm_head"]}}
ONLY_FC |= {layout: {"block_name_to_quantize": "model.fc"} for layout in (AUTO_GPTQ, AUTO_AWQ)}


@pytest.mark.parametrize("layout", ONLY_FC)
def test_an_fc_that_vllm_holds_as_integers(engine: Engine, layout: str) -> None:
    """vLLM reads these on a CPU as they are meant: fc stays with it, behind the norms and their cat."""
    quantization = {"quantization_config": config_of(layout) | ONLY_FC[layout]}
    drafter = write_drafter(engine.folder / f"drafter-held-{layout}", 3, "chunk", layout, **quantization)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    off = engine.run(request, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request)
    assert on.tokens == off.tokens == EXPECTED
    assert on.accepted_length == off.accepted_length == BEST
    method = {GPTQ: "AutoGPTQLinearMethod", AWQ: "AutoAWQMarlinLinearMethod"}.get(layout, "INCLinearMethod")
    runs = f"{COMBINE} runs norm_concat (K=3, chunk norm), its fc stays with vLLM: its quant_method is {method}"
    assert on.lines == [f"{runs}; forced, not timed"]
    assert off.calls == [] and [set(calls) for calls in on.calls] == [{"norm_concat"}]


@pytest.mark.parametrize("layout", [GPTQ, AWQ])
def test_a_drafter_all_of_integers(engine: Engine, layout: str) -> None:
    """vLLM looks for GPTQ's layers by the names in the file: its `layers.3` is `midlayer` there, so that its decoder
    layer is unquantized and has no parameter for the codes. The plugin dequantizes them."""
    folder, quantization = engine.folder / f"drafter-whole-{layout}", {"quantization_config": config_of(layout)}
    drafter = write_drafter(folder, 3, "chunk", layout, whole=True, **quantization)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    off = engine.run(request, may_fail=True, EAGLE_KERNELS_VLLM="0")
    if layout == AWQ:
        assert (off.tokens, off.accepted_length) == (EXPECTED, BEST)
    else:
        assert off.returncode != 0 and "no module or parameter named 'layers.0.mlp.down_proj.qweight'" in off.log
    on = engine.run(request)
    assert (on.tokens, on.accepted_length) == (EXPECTED, BEST)
    loaded = {line.partition(" of ")[0] for line in on.lines if "the engine's layer has no scales" in line}
    of_layer = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert loaded == (of_layer if layout == GPTQ else set())
    assert [set(calls) for calls in on.calls] == [{"norm_concat"}]


def test_an_unquantized_layer_that_an_awq_config_does_not_list(engine: Engine) -> None:
    """By the same names vLLM builds the decoder layer for AWQ, with the plugin too; `doctor` finds it."""
    quantization = {"quantization_config": config_of(AWQ)}
    drafter = write_drafter(engine.folder / "drafter-awq-unlisted", 3, "chunk", AWQ, **quantization)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    for switch in ("0", "force"):
        run = engine.run(request, may_fail=True, EAGLE_KERNELS_VLLM=switch)
        assert run.returncode != 0 and "no module or parameter named 'layers.0.mlp.down_proj.weight'" in run.log


@pytest.mark.parametrize(
    ("layout", "first"), [(GPTQ, "g_idx"), (AWQ, "qweight"), (AUTO_GPTQ, "g_idx"), (AUTO_AWQ, "qweight")]
)
def test_an_eh_proj_of_integers(engine: Engine, layout: str, first: str) -> None:
    """A plain nn.Linear: vLLM has no parameter for its tensors, and ends at the first one."""
    folder, only = engine.folder / f"counting-deepseek-{layout}", {"block_name_to_quantize": "eh_proj"}
    quantization = {"quantization_config": config_of(layout) | (only if layout in (AUTO_GPTQ, AUTO_AWQ) else {})}
    request = mtp_request(engine, None) | {"target": write_counting_deepseek(folder, layout, **quantization)}
    off = engine.run(request, may_fail=True, EAGLE_KERNELS_VLLM="0")
    assert off.returncode != 0 and f"KeyError: 'model.layers.2.eh_proj.{first}'" in off.log
    on = engine.run(request)
    assert (on.tokens, on.accepted_length) == (EXPECTED, BEST)
    loaded = "eh_proj of DeepSeekMTP of vLLM is integers in groups in the checkpoint; the engine's layer has no scales"
    runs = "DeepSeekMultiTokenPredictorLayer.eh_proj runs norm_concat_linear; forced, not timed"
    assert on.lines == [f"{loaded}: dequantized to torch.bfloat16", runs]
    assert [set(calls) for calls in on.calls] == [{"norm_concat_linear"}]


def test_a_gptq_fc_of_which_the_config_says_nothing_is_refused(engine: Engine) -> None:
    """Only the config says whether its zeros are stored less 1. vLLM alone has no parameter for its codes."""
    drafter = write_drafter(engine.folder / "drafter-gptq", 3, "chunk", GPTQ)
    request = {"target": write_target(engine.folder / "target"), "drafter": drafter}
    off = engine.run(request, may_fail=True, EAGLE_KERNELS_VLLM="0")
    assert off.returncode != 0 and "There is no module or parameter named 'fc." in off.log
    on = engine.run(request, may_fail=True)
    assert on.returncode != 0 and "load_weights: fc.qweight is gptq, expected a config.json beside it" in on.log


@pytest.mark.parametrize("layout", [*LAYOUTS, AWQ])
def test_a_quantized_fc_of_which_the_config_says_nothing(engine: Engine, layout: str) -> None:
    drafter = write_drafter(engine.folder / f"drafter-{layout}", 3, "chunk", layout)
    run = engine.run({"target": write_target(engine.folder / "target"), "drafter": drafter})
    assert (run.tokens, run.accepted_length) == (EXPECTED, BEST)
    assert f"{RUNS} (K=3, chunk norm); forced, not timed" in run.lines
    assert [set(calls) for calls in run.calls] == [{"norm_concat_linear"}]
