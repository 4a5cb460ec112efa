"""Layer 0 of EAGLE-3 drafters in the real SGLang: the drafts are right only where that layer is (`layer0_drafter`)."""

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from engines.sglang import checkpoints
from engines.sglang.test_engine import BEST, LOST, PROBES, Case, off

LAYERS = {"layer0": "LlamaDecoderLayer.qkv_proj", "latent": "Eagle3MLADecoderLayer.fused_qkv_a_proj_with_mqa"}
ON = ("EAGLE_KERNELS_SGLANG_LAYER0", "1")
# A step runs one extend and two decodes of the drafter; 16 tokens take 4 steps and a prefill.
CALLS = 5 + 2 * 4


def case(*environment: tuple[str, str], reads: str = "layer0", **more: object) -> Case:
    drafter = checkpoints.Drafter(reads=reads)
    return Case(drafter, environment=(ON, *off("PROJECTION"), *environment), **more)


@pytest.mark.parametrize(
    ("reads", "topk", "tp"), [("layer0", 1, 1), ("layer0", 1, 2), ("layer0", 2, 1), ("latent", 1, 1), ("latent", 1, 2)]
)
def test_every_draft_is_accepted(tmp_path: Path, reads: str, topk: int, tp: int) -> None:
    run = case(reads=reads, topk=topk, tp=tp).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert run.ops["norm_concat_linear"] >= (PROBES + CALLS) * tp
    assert f"{LAYERS[reads]} runs norm_concat_linear (K=2, chunk norm); forced, not timed" in run.log


def test_of_a_gpt_oss_target(tmp_path: Path) -> None:
    """Its drafter is a Llama's. The captures come after layers with sinks and a sliding window."""
    on = case(target="gpt_oss").run(tmp_path / "on")
    without = case(*off("LAYER0"), target="gpt_oss").run(tmp_path / "off")
    assert on.accept_lengths == without.accept_lengths == [BEST] * 2, on.log[-3000:]
    assert "type=GptOssForCausalLM" in on.log
    assert on.ops["norm_concat_linear"] >= PROBES + CALLS and not without.ops["norm_concat_linear"]


@pytest.mark.parametrize("reads", LAYERS)
def test_without_the_hook(tmp_path: Path, reads: str) -> None:
    run = case(*off("LAYER0"), reads=reads).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    assert not run.ops["norm_concat_linear"]


@pytest.mark.parametrize("reads", LAYERS)
@pytest.mark.parametrize(("first", "accepted"), [(PROBES + 1, LOST), (1, BEST)], ids=["later", "at-load"])
def test_a_broken_projection(tmp_path: Path, first: int, accepted: float, reads: str) -> None:
    """The negative control: the accepted length depends on our op. An op that is broken at load is detected there."""
    run = case(("PROBE_CORRUPT", f"norm_concat_linear:{first}"), reads=reads).run(tmp_path)
    assert run.accept_lengths == [accepted] * 2
    assert ("gives other values than the engine" in run.log) == (first == 1)


def test_it_runs_where_it_is_faster(tmp_path: Path) -> None:
    run = case(("EAGLE_KERNELS_SGLANG", "1"), tp=2).run(tmp_path)
    assert run.accept_lengths == [BEST] * 2, run.log[-3000:]
    lines = {line.partition("eagle_kernels: ")[2] for line in run.log.splitlines() if "ms (SGLang " in line}
    (line,) = lines  # the same figures on both ranks
    assert line.startswith("LlamaDecoderLayer.qkv_proj ") and "T=1024" in line
