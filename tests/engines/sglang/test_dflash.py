"""A DFlash drafter in the real SGLang: its drafts are right only where K and V of its context are (`dflash_drafter`).

On a CPU, where SGLang refuses to run DFlash (`standins/dflash_on_cpu.py`): its path without Triton, where each layer
computes K and V from what `project_target_hidden` returns.
"""

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from engines.quantized_layers import AWQ, W4A16
from engines.sglang import checkpoints
from engines.sglang.test_engine import BEST, LOST, PROBES, Case, off

DRAFTER = checkpoints.DFlashDrafter()


def case(*environment: tuple[str, str], drafter: checkpoints.DFlashDrafter = DRAFTER, **more: object) -> Case:
    arguments = (("speculative_algorithm", "DFLASH"),)
    return Case(drafter, environment=(("PROBE_DFLASH", "1"), *environment), arguments=arguments, **more)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_draft_is_accepted(tmp_path: Path, tp: int) -> None:
    run = case(tp=tp).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    # One prefill and 4 steps, on every rank.
    assert run.ops["norm_concat_linear"] == (PROBES + 5) * tp
    assert "DFlashDraftModel.project_target_hidden runs norm_concat_linear (K=3, no norm); forced" in run.log


def test_without_the_plugin(tmp_path: Path) -> None:
    run = case(*off()).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert not run.ops


@pytest.mark.parametrize("layout", ["hf-block", "modelopt-nvfp4", W4A16, AWQ])
def test_a_quantized_fc_is_loaded_with_its_scale(tmp_path: Path, layout: str) -> None:
    """sglang#39087: DFlash2-W4A16 and similar drafters."""
    run = case(drafter=checkpoints.DFlashDrafter(layout=layout)).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert run.ops["norm_concat_linear"] == PROBES + 5
    assert "fc of DFlashDraftModel of SGLang is " in run.log


def test_a_quantized_fc_without_the_plugin(tmp_path: Path) -> None:
    run = case(*off("SCALES"), drafter=checkpoints.DFlashDrafter(layout="hf-block")).run(tmp_path)
    assert len(run.accept_lengths) == 2 and max(run.accept_lengths) <= 2, run.log[-3000:]


@pytest.mark.parametrize(("first", "accepted"), [(PROBES + 1, LOST), (1, BEST)], ids=["later", "at-load"])
def test_a_broken_projection(tmp_path: Path, first: int, accepted: float) -> None:
    """The negative control: the accepted length depends on our op. An op that is broken at load is detected there."""
    run = case(("PROBE_CORRUPT", f"norm_concat_linear:{first}")).run(tmp_path)
    assert run.accept_lengths == [accepted] * 2
    assert ("gives other values than the engine" in run.log) == (first == 1)


# Mistakes in place of our op, and in places of SGLang's layer.
NO_HIDDEN_NORM = """
from dataclasses import replace
from eagle_kernels.engines.sglang.context import Context
Context.__call__ = lambda self, x: replace(self.projection, post_norm=None)(x)
"""
ANOTHER_TOKEN = """
from eagle_kernels.engines.sglang.context import Context
own = Context.__call__
Context.__call__ = lambda self, x: own(self, x).roll(1, 0)
"""
OFF_BY_ONE = """
from sglang.srt.models.dflash import DFlashAttention
own = DFlashAttention.apply_k_rope
DFlashAttention.apply_k_rope = lambda self, positions, k: own(self, positions + 1, k)
"""
NO_KEY_NORM = """
from sglang.srt.models.dflash import DFlashAttention
DFlashAttention.apply_k_norm = lambda self, k: k
"""
GAIN_OF_LAYER_0 = """
from sglang.srt.models.dflash import DFlashAttention
own, first = DFlashAttention.apply_k_norm, []
DFlashAttention.apply_k_norm = lambda self, k: own((first or first.append(self) or first)[0], k)
"""


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(NO_HIDDEN_NORM, id="no-hidden-norm"),
        pytest.param(ANOTHER_TOKEN, id="another-token"),
        pytest.param(OFF_BY_ONE, id="position-off-by-one"),
        pytest.param(NO_KEY_NORM, id="no-key-norm"),
        pytest.param(GAIN_OF_LAYER_0, id="gain-of-layer-0"),
    ],
)
def test_a_mistake_loses_drafts(tmp_path: Path, mistake: str) -> None:
    run = case(("PROBE_MISTAKE", mistake)).run(tmp_path)
    assert len(run.accept_lengths) == 2 and max(run.accept_lengths) <= 2, run.log[-3000:]
