"""The real engine on a CPU: counting checkpoints reach their best accepted length, 4.0 at 3 steps, or lose every draft.

`make test-sglang` runs them in an environment of its own. A run whose drafts are all wrong accepts one token a step,
16 / 15 = 1.07 for the 16 new tokens; the tokens themselves are the target's, and right, in any case.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from engines.quantized_layers import AUTO_AWQ, AUTO_GPTQ, AWQ, GPTQ, W4A16, config_of
from engines.sglang import checkpoints, run_engine

HERE = Path(__file__).parent
BEST, LOST = 4.0, pytest.approx(16 / 15)
# Calls of a projection at load: with one packed tensor, then with 1 to 4 rows of it and of chunks with `out`.
PROBES = 1 + 4 + 4
ROOT_H = checkpoints.H**0.5
GEMMA_DRAFTER = checkpoints.Drafter(stream_length=ROOT_H)  # boundaries 1, 3, 4
ONLY_EMBEDDING = checkpoints.Drafter(reads="embedding")
SQUARE = checkpoints.Drafter(norm="chunk", width=3 * checkpoints.H)  # K*Ht == Hd


@dataclass
class Run:
    accept_lengths: list[float] = field(default_factory=list)
    captured: list[list[list[float]]] = field(default_factory=list)  # [requests][decode steps][K*H]
    ops: Counter = field(default_factory=Counter)
    log: str = ""


@dataclass(frozen=True)
class Case:
    drafter: checkpoints.Drafter | checkpoints.DFlashDrafter | checkpoints.MTPDrafter
    target: str = "llama"
    V: int = 128
    dtype: str = "bfloat16"
    tp: int = 1
    topk: int = 1
    environment: tuple[tuple[str, str], ...] = ()
    arguments: tuple[tuple[str, object], ...] = ()  # more arguments of sglang.Engine
    prompts: tuple[tuple[int, ...], ...] = tuple(map(tuple, run_engine.PROMPTS))
    compiled: bool = False  # SGLang's CPU graph runner, which has no speculation: returns the captured states

    def run(self, folder: Path) -> Run:
        dtype = getattr(torch, self.dtype)
        target = getattr(checkpoints, f"{self.target}_target")(folder / "target", self.V, dtype)
        arguments = {
            "model_path": target,
            "dtype": self.dtype,
            "tp_size": self.tp,
            "speculative_algorithm": "EAGLE3",
            "prompts": self.prompts,
        } | dict(self.arguments)
        if self.compiled:
            arguments |= {"enable_torch_compile": True, "torch_compile_max_bs": 2}
            arguments |= {"enable_return_aux_hidden_states": True}
            arguments |= {"return_aux_hidden_state_layer_ids": self.drafter.layer_ids}
        else:
            arguments |= {"speculative_draft_model_path": self.drafter.save(folder / "drafter", self.V, dtype)}
            arguments |= {"speculative_num_draft_tokens": 4 if self.topk == 1 else 6}
            if arguments["speculative_algorithm"] in ("EAGLE", "EAGLE3"):
                arguments |= {"speculative_num_steps": 3, "speculative_eagle_topk": self.topk}
        probe = folder / "probe.txt"
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE / "standins"), os.environ.get("PYTHONPATH")))),
            "PROBE_FILE": str(probe),
            "OMP_NUM_THREADS": "1",
            "SGLANG_NCCL_SO_PATH": "none",  # the CUDA build of torch brings NCCL, which dies without a driver
            "EAGLE_KERNELS_SGLANG": "force",  # at these widths SGLang's own modules are faster
            "EAGLE_KERNELS_SGLANG_LAYER0": "0",  # on in its own tests: other tests' drafters ignore its output
        }
        if not self.compiled:
            environment["TORCHDYNAMO_DISABLE"] = "1"  # small helpers compile on their first call: 10 to 20 s a run
        if self.tp > 1:
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(["0"] * self.tp)  # else an assertion about NUMA nodes
        environment |= dict(self.environment)
        command = [sys.executable, str(HERE / "run_engine.py"), json.dumps(arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        run = Run(log=done.stdout + done.stderr)
        if probe.exists():
            run.ops.update(line.split(" ")[0] for line in probe.read_text().splitlines())
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                outputs = json.loads(line.removeprefix("RESULT "))
                for output, prompt in zip(outputs, self.prompts, strict=True):
                    counted = [(prompt[-1] + 1 + i) % self.V for i in range(run_engine.NEW_TOKENS)]
                    assert output["tokens"] == counted
                if self.compiled:
                    run.captured = [output["captured"] for output in outputs]
                else:
                    run.accept_lengths = [output["accept_length"] for output in outputs]
        return run


def off(part: str = "") -> tuple[tuple[str, str], ...]:
    return ((f"EAGLE_KERNELS_SGLANG{'_' + part if part else ''}", "0"),)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("norm", ["chunk", "concat"])
def test_every_draft_is_accepted(tmp_path: Path, norm: str, topk: int, tp: int) -> None:
    run = Case(checkpoints.Drafter(norm=norm), topk=topk, tp=tp).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    # One prefill and 4 steps, on every rank: the drafter projects once in each, the target captures 3 layers.
    assert run.ops == {"norm_concat_linear": (PROBES + 5) * tp, "capture_hidden": 15 * tp}
    assert f"runs norm_concat_linear (K=3, {norm} norm); forced, not timed" in run.log


LONG, SIX = (tuple(range(40)),), tuple(tuple(range(n, 2 * n)) for n in range(3, 9))
SHARED = tuple((*range(48), 48 + n) for n in range(3))
HELD_OUT = {
    "K1-odd-vocabulary-chunked-prefill": Case(
        checkpoints.Drafter(norm="chunk", layer_ids=(2,)),
        V=131,
        prompts=LONG,
        arguments=(("chunked_prefill_size", 16),),
    ),
    "K2-d2t-prefix-caching": Case(
        checkpoints.Drafter(norm="concat", layer_ids=(1, 4), draft_V=101),
        prompts=SHARED + SHARED,
        arguments=(("max_running_requests", 1),),
    ),
    "K5-six-requests": Case(
        checkpoints.Drafter(norm="chunk", layer_ids=(0, 1, 2, 3, 4), chunk=4),
        prompts=SIX,
        arguments=(("max_running_requests", 6),),
    ),
    "K6-norm-output-tp3": Case(
        checkpoints.Drafter(norm="both", layer_ids=(0, 1, 2, 3, 4, 5), chunk=5, norm_output=True), tp=3
    ),
    "K7-odd-vocabulary-d2t-tp2": Case(
        checkpoints.Drafter(norm="chunk", layer_ids=(0, 1, 2, 3, 4, 5, -1), chunk=6, draft_V=99), V=173, tp=2
    ),
}


@pytest.mark.parametrize("name", HELD_OUT)
def test_nothing_changes_where_users_go(tmp_path: Path, name: str) -> None:
    """In both runs the tokens are the target's, which `Case.run` checks."""
    on = HELD_OUT[name].run(tmp_path / "on")
    without = dataclasses.replace(HELD_OUT[name], environment=off()).run(tmp_path / "off")
    # With norm_output SGLang accepts one of three drafts of this drafter, with the plugin and without.
    accepted = 2.0 if HELD_OUT[name].drafter.norm_output else BEST
    assert on.accept_lengths == without.accept_lengths == [accepted] * len(HELD_OUT[name].prompts), on.log[-3000:]
    assert on.ops["norm_concat_linear"] > PROBES and not without.ops


@pytest.mark.parametrize(("norm", "tp"), [("chunk", 2), ("both", 3), ("none", 3)])
def test_row_parallel_ranks_draft_as_one(tmp_path: Path, norm: str, tp: int) -> None:
    row_parallel = (("EAGLE_KERNELS_SGLANG_ROW_PARALLEL", "1"),)
    run = Case(checkpoints.Drafter(norm=norm, chunk=2), tp=tp, environment=row_parallel).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert f"columns {tp} ways); row-parallel on {tp} ranks, not timed" in run.log
    # On every rank: probes alone and together with the other ranks, one prefill and 4 steps.
    assert run.ops["norm_concat_linear"] == (2 * PROBES + 5) * tp


@pytest.mark.parametrize(("first", "accepted"), [(PROBES + 1, LOST), (1, BEST)], ids=["later", "at-load"])
def test_a_broken_projection(tmp_path: Path, first: int, accepted: float) -> None:
    """The negative control: the accepted length depends on our op. An op that is broken at load is detected there."""
    corrupt = (("PROBE_CORRUPT", f"norm_concat_linear:{first}"),)
    run = Case(checkpoints.Drafter(norm="chunk"), environment=corrupt).run(tmp_path)
    assert run.accept_lengths == [accepted] * 2
    assert ("gives other values than the engine" in run.log) == (first == 1)


def test_switched_off_it_leaves_the_engine_alone(tmp_path: Path) -> None:
    run = Case(checkpoints.Drafter(norm="chunk"), environment=off()).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2
    assert not run.ops and "eagle_kernels:" not in run.log


def test_a_backend_that_does_not_run_here_leaves_all_to_the_engine(tmp_path: Path) -> None:
    """The first forward raised, and the scheduler died."""
    run = Case(checkpoints.Drafter(norm="chunk"), environment=(("EAGLE_KERNELS_BACKEND", "triton"),)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert not run.ops and "llama_eagle3.LlamaModel stays with SGLang: norm_concat_linear: " in run.log


def test_another_plugin_on_the_same_class(tmp_path: Path) -> None:
    target = "sglang.srt.models.llama_eagle3.LlamaModel.forward"
    run = Case(checkpoints.Drafter(norm="chunk"), environment=(("PROBE_HOOK", target),)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2
    assert run.ops["hook"] > 0 and run.ops["norm_concat_linear"] == PROBES + 5


# Model-Optimizer, compressed-tensors, Quark, Hugging Face's fp8, DeepSeek V4 and V4.1, Mistral; e2m1 codes of half the
# width crash SGLang's loader.
QUANTIZED = ("modelopt-fp8", "modelopt-row", "hf-block", "compressed-int8", "modelopt-mxfp8")
QUANTIZED += ("deepseek-block", "deepseek-v4.1", "mistral")
PACKED = ("quark-mxfp4", "modelopt-nvfp4", "compressed-nvfp4", W4A16, AWQ)


@pytest.mark.parametrize("layout", QUANTIZED + PACKED)
def test_a_quantized_fc_is_loaded_with_its_scale(tmp_path: Path, layout: str) -> None:
    """sglang#39087."""
    run = Case(checkpoints.Drafter(norm="chunk", layout=layout)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert run.ops["norm_concat_linear"] == PROBES + 5
    assert "fc of LlamaForCausalLMEagle3 of SGLang is " in run.log


@pytest.mark.parametrize("layout", ("modelopt-fp8", "hf-block", "compressed-int8"))
def test_a_quantized_fc_without_the_plugin(tmp_path: Path, layout: str) -> None:
    run = Case(checkpoints.Drafter(norm="chunk", layout=layout), environment=off("SCALES")).run(tmp_path)
    assert run.accept_lengths == [LOST] * 2, run.log[-3000:]


# GPTQ's config has all linear layers in codes, since on a CPU SGLang leaves none out; the others have fc alone. Without
# its own CPU kernels SGLang takes its AWQ for GPUs, which has fp16 only.
BLOCKS = {"block_name_to_quantize": "fc"}
IN_INTEGERS = {
    GPTQ: checkpoints.Drafter(norm="chunk", layout=GPTQ, whole=True, quantization=config_of(GPTQ)),
    AWQ: checkpoints.Drafter(
        norm="chunk", layout=AWQ, quantization=config_of(AWQ) | {"modules_to_not_convert": ["_proj"]}
    ),
    AUTO_GPTQ: checkpoints.Drafter(norm="chunk", layout=AUTO_GPTQ, quantization=config_of(AUTO_GPTQ) | BLOCKS),
    AUTO_AWQ: checkpoints.Drafter(norm="chunk", layout=AUTO_AWQ, quantization=config_of(AUTO_AWQ) | BLOCKS),
}


@pytest.mark.parametrize("layout", IN_INTEGERS)
def test_an_fc_of_integers(tmp_path: Path, layout: str) -> None:
    """SGLang has no parameter for the codes of a plain nn.Linear and skips them by name: its weight stays what it was
    made with. A decoder layer in codes, which has a quantization method, stays with SGLang."""
    case = Case(IN_INTEGERS[layout], dtype="float16" if layout == AWQ else "bfloat16")
    without = dataclasses.replace(case, environment=off("SCALES")).run(tmp_path / "off")
    # A draft of a random fc may be right.
    assert len(without.accept_lengths) == 2 and max(without.accept_lengths) < 2, without.log[-3000:]
    run = case.run(tmp_path / "on")
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert run.ops["norm_concat_linear"] == PROBES + 5
    assert run.log.count("is integers in groups in the checkpoint; the engine's layer has no scales") == 1


def test_a_gptq_fc_of_which_the_config_says_nothing_is_refused(tmp_path: Path) -> None:
    """Only the config says whether its zeros are stored less 1."""
    run = Case(checkpoints.Drafter(norm="chunk", layout=GPTQ)).run(tmp_path)
    assert not run.accept_lengths and "load_weights: fc.qweight is gptq, expected a config.json beside it" in run.log


def mtp(layout: str, *environment: tuple[str, str]) -> Case:
    arguments = (("speculative_algorithm", "EAGLE"),)
    return Case(checkpoints.MTPDrafter(layout), target="mimo", environment=environment, arguments=arguments)


@pytest.mark.parametrize("layout", ["", "hf-block", "modelopt-nvfp4", AWQ])
def test_a_quantized_projection_of_an_mtp_layer(tmp_path: Path, layout: str) -> None:
    """sglang#39254: MiMo's input_proj, an nn.Linear, loaded from its target's checkpoint."""
    run = mtp(layout).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert run.ops["norm_concat_linear"] > PROBES
    assert ("input_proj of MiMoMTP of SGLang is " in run.log) == bool(layout)


def test_a_quantized_projection_of_an_mtp_layer_without_the_plugin(tmp_path: Path) -> None:
    """MiMo's loader looks for a parameter with the scale's name."""
    run = mtp("hf-block", *off("SCALES")).run(tmp_path)
    assert not run.accept_lengths and "KeyError: 'model.input_proj.weight_scale_inv'" in run.log


@pytest.mark.parametrize(
    ("environment", "accepted"), [pytest.param((), BEST, id="on"), pytest.param(off("PROJECTION"), LOST, id="off")]
)
def test_fc_as_wide_as_the_drafter(tmp_path: Path, environment: tuple, accepted: float) -> None:
    """K*Ht == Hd: SGLang skips fc, since it compares the widths."""
    run = Case(SQUARE, V=100, environment=environment).run(tmp_path)
    assert run.accept_lengths == [accepted] * 2


@pytest.mark.parametrize(
    ("environment", "accepted"),
    [pytest.param((), BEST, id="on"), pytest.param(off("GEMMA3_CAPTURE"), LOST, id="off")],
)
def test_gemma3_captures_its_residual(tmp_path: Path, environment: tuple, accepted: float) -> None:
    """sglang#39286."""
    run = Case(GEMMA_DRAFTER, target="gemma3", dtype="float32", environment=environment).run(tmp_path)
    assert run.accept_lengths == [accepted] * 2


def test_captures_under_torch_compile(tmp_path: Path) -> None:
    """The CPU graph runner compiles the decode model, hooks included: the states it returns have Gemma's residual."""
    run = Case(GEMMA_DRAFTER, target="gemma3", dtype="float32", compiled=True).run(tmp_path)
    assert len(run.captured) == len(run_engine.PROMPTS), run.log[-3000:]
    assert "Capture target decode CPU graph end" in run.log
    assert "capture stays with SGLang: torch.compile fuses" in run.log and not run.ops["capture_hidden"]
    for prompt, steps in zip(run_engine.PROMPTS, run.captured, strict=True):
        streams = torch.tensor(steps).view(len(steps), -1, checkpoints.H)
        tokens = prompt[-1] + 1 + torch.arange(len(steps))
        # Only the last layer adds anything: each boundary has sqrt(H) e_t of the token that it reads.
        expected = ROOT_H * torch.eye(checkpoints.H)[tokens].unsqueeze(1).expand_as(streams)
        assert torch.allclose(streams, expected, rtol=1e-5, atol=1e-4)


def test_a_stage_runs_where_it_is_faster(tmp_path: Path) -> None:
    """Timed at load, with one decision on both ranks; at these widths SGLang's own modules may be faster."""
    run = Case(checkpoints.Drafter(norm="chunk"), tp=2, environment=(("EAGLE_KERNELS_SGLANG", "1"),)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    lines = {line.partition("eagle_kernels: ")[2] for line in run.log.splitlines() if "ms (SGLang " in line}
    (line,) = lines  # the same figures on both ranks
    assert line.startswith("llama_eagle3.LlamaModel ") and "T=1024" in line


def test_gemma3_captures_without_the_packed_tensor(tmp_path: Path) -> None:
    run = Case(GEMMA_DRAFTER, target="gemma3", dtype="float32", environment=off("CAPTURE")).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2


def test_gemma3_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    run = Case(ONLY_EMBEDDING, target="gemma3", V=100, dtype="float32", tp=2).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert "shares a padded copy of 64 rows" in run.log


def test_gemma3_vocabulary_that_does_not_divide_crashes_sglang(tmp_path: Path) -> None:
    """A rank gets ceil(100 / 2) = 50 rows, where the drafter's rank 0 expects 64."""
    run = Case(ONLY_EMBEDDING, target="gemma3", V=100, dtype="float32", tp=2, environment=off("VOCAB")).run(tmp_path)
    assert not run.accept_lengths
    assert "IndexError: index out of range in self" in run.log
