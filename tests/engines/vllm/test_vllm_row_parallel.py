"""The row-parallel projection in the real engine: two and three ranks draft as one does."""

import pytest

pytest.importorskip("vllm", reason="the real engine lives in the environment of `make test-vllm`")

from vllm_checkpoints import write_deepseek, write_drafter, write_target
from vllm_engine import EXPECTED, Engine

SWITCHES = {"EAGLE_KERNELS_VLLM_ROW_PARALLEL": "1"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("row-parallel"))


@pytest.mark.parametrize(("K", "norm", "tp"), [(3, "chunk", 2), (4, "concat", 3), (3, "none", 3)])
def test_ranks_draft_as_one(engine: Engine, K: int, norm: str, tp: int) -> None:
    drafter = write_drafter(engine.folder / f"drafter-{K}-{norm}", K, norm)
    run = engine.run({"target": write_target(engine.folder / "target"), "drafter": drafter, "tp": tp}, **SWITCHES)
    assert (run.tokens, run.accepted_length) == (EXPECTED, 4.0)
    kind = f"K={K}, {'no' if norm == 'none' else norm} norm, columns {tp} ways"
    assert run.lines == [
        "Eagle3LlamaForCausalLM.combine_hidden_states runs norm_concat_linear "
        f"({kind}); row-parallel on {tp} ranks, not timed"
    ]
    assert len(run.calls) == tp and all(calls["norm_concat_linear"] >= 6 for calls in run.calls)


def test_mtp_ranks_draft_as_one(engine: Engine) -> None:
    """Compared with vLLM's own ranks: with dummy weights few drafts are accepted, and the weights differ by shard."""
    request = {"target": write_deepseek(engine.folder / "deepseek"), "method": "mtp", "load_format": "dummy", "tp": 2}
    request["num_speculative_tokens"] = 1
    off = engine.run(request, EAGLE_KERNELS_VLLM="0")
    on = engine.run(request, **SWITCHES)
    assert (on.tokens, on.accepted_length) == (off.tokens, off.accepted_length)
    assert on.lines == [
        "DeepSeekMultiTokenPredictorLayer.eh_proj runs norm_concat_linear; row-parallel on 2 ranks, not timed"
    ]
    assert len(on.calls) == 2
