"""The real engine on a CPU: counting checkpoints reach their best accepted length, 4.0 at 3 steps, or lose every draft.

`make test-sglang` runs them in an environment of its own. A run whose draft never fits accepts one token a step,
16 / 15 = 1.07 of the 16 new tokens; the tokens themselves are the target's, and right, in any case.
"""

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

from engines.sglang import checkpoints, run_engine

HERE = Path(__file__).parent
BEST, LOST = 4.0, pytest.approx(16 / 15)
ROOT_H = checkpoints.H**0.5
GEMMA_DRAFTER = checkpoints.Drafter(stream_length=ROOT_H)  # boundaries 1, 3, 4
ONLY_EMBEDDING = checkpoints.Drafter(reads="embedding")
SQUARE = checkpoints.Drafter(norm="chunk", width=3 * checkpoints.H)  # K*Ht == Hd


@dataclass
class Run:
    accept_lengths: list[float] = field(default_factory=list)
    ops: Counter = field(default_factory=Counter)
    log: str = ""


@dataclass(frozen=True)
class Case:
    drafter: checkpoints.Drafter
    target: str = "llama"
    V: int = 128
    dtype: str = "bfloat16"
    tp: int = 1
    topk: int = 1
    environment: tuple[tuple[str, str], ...] = ()

    def run(self, folder: Path) -> Run:
        dtype = getattr(torch, self.dtype)
        target = getattr(checkpoints, f"{self.target}_target")(folder / "target", self.V, dtype)
        arguments = {
            "model_path": target,
            "dtype": self.dtype,
            "tp_size": self.tp,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": self.drafter.save(folder / "drafter", self.V, dtype),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": 4 if self.topk == 1 else 6,
        }
        probe = folder / "probe.txt"
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HERE / "standins"),
            "PROBE_FILE": str(probe),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles small helpers on their first call: 10 to 20 s a run
        }
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
                for output, prompt in zip(outputs, run_engine.PROMPTS, strict=True):
                    counted = [(prompt[-1] + 1 + i) % self.V for i in range(run_engine.NEW_TOKENS)]
                    assert output["tokens"] == counted
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
    assert run.ops == {"norm_concat_linear": 5 * tp, "capture_hidden_out": 15 * tp}
    assert f"runs norm_concat_linear (K=3, {norm} norm)" in run.log


def test_a_broken_projection_loses_every_draft(tmp_path: Path) -> None:
    """The negative control: the accepted length hangs on our op."""
    drafter = checkpoints.Drafter(norm="chunk")
    run = Case(drafter, environment=(("PROBE_CORRUPT", "norm_concat_linear"),)).run(tmp_path)
    assert run.accept_lengths == [LOST] * 2


def test_switched_off_it_leaves_the_engine_alone(tmp_path: Path) -> None:
    run = Case(checkpoints.Drafter(norm="chunk"), environment=off()).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2
    assert not run.ops and "eagle_kernels:" not in run.log


def test_another_plugin_on_the_same_class(tmp_path: Path) -> None:
    target = "sglang.srt.models.llama_eagle3.LlamaModel.forward"
    run = Case(checkpoints.Drafter(norm="chunk"), environment=(("PROBE_HOOK", target),)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2
    assert run.ops["hook"] > 0 and run.ops["norm_concat_linear"] == 5


@pytest.mark.parametrize(
    ("environment", "accepted"), [pytest.param((), BEST, id="on"), pytest.param(off("PROJECTION"), LOST, id="off")]
)
def test_fc_as_wide_as_the_drafter(tmp_path: Path, environment: tuple, accepted: float) -> None:
    """K*Ht == Hd: SGLang skips fc, since it compares widths."""
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


def test_gemma3_captures_without_the_packed_tensor(tmp_path: Path) -> None:
    run = Case(GEMMA_DRAFTER, target="gemma3", dtype="float32", environment=off("CAPTURE")).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2


def test_gemma3_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    run = Case(ONLY_EMBEDDING, target="gemma3", V=100, dtype="float32", tp=2).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert "shares a padded copy of 64 rows" in run.log


def test_gemma3_vocabulary_that_does_not_divide_crashes_sglang(tmp_path: Path) -> None:
    """ceil(100 / 2) = 50 rows, where the drafter's rank 0 looks for 64."""
    run = Case(ONLY_EMBEDDING, target="gemma3", V=100, dtype="float32", tp=2, environment=off("VOCAB")).run(tmp_path)
    assert not run.accept_lengths
    assert "IndexError: index out of range in self" in run.log
