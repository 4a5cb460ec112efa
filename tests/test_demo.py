"""The trained example: its drafts are worth what they should be, its decoding is exact, and the demo says so."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from eagle_kernels.bench import speculation
from eagle_kernels.bench.cli import main
from eagle_kernels.byte_eagle3.assemble import MISTAKES, Checkpoint, assemble, load
from eagle_kernels.byte_eagle3.decode import Drafter, speculate
from transformers import DynamicCache

HOME = Path(__file__).resolve().parent.parent / "examples" / "byte_eagle3"
COUNT, DRAFTS = 32, 4


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load(HOME)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_weights_are_small_and_their_gains_matter(checkpoint: Checkpoint) -> None:
    assert sum(path.stat().st_size for path in HOME.rglob("*.safetensors")) < 8e6
    gains = [weight for name, weight in checkpoint.weights.items() if name.startswith("fc_norm.")]
    assert len(gains) == 3 and all(gain.std() > 0.03 for gain in gains)


@pytest.mark.parametrize("drafts", [1, 2, 3, 7])
def test_any_number_of_drafts_gives_the_greedy_tokens(checkpoint: Checkpoint, drafts: int) -> None:
    prompt = checkpoint.prompts[drafts % len(checkpoint.prompts)]
    decoded = speculate(checkpoint.target, assemble(checkpoint), prompt, COUNT, drafts)
    assert decoded.tokens == speculation.generate(checkpoint, prompt, COUNT)
    assert min(decoded.accepted) >= 1 and max(decoded.accepted) <= drafts + 1
    # The prompt's own forward gives one token; the last step may go beyond what was asked for.
    assert COUNT - 1 <= sum(decoded.accepted) <= COUNT - 1 + drafts


def test_a_drafter_that_is_always_wrong_costs_no_token(checkpoint: Checkpoint) -> None:
    right, prompt = assemble(checkpoint), checkpoint.prompts[0]
    worst = dataclasses.replace(right, head=-right.head)
    decoded = speculate(checkpoint.target, worst, prompt, COUNT, DRAFTS)
    assert decoded.tokens == speculation.generate(checkpoint, prompt, COUNT)
    assert decoded.accepted == [1] * (COUNT - 1)


class Uncached(Drafter):
    """Drafts every time from all rows so far, with an empty cache."""

    def begin(self) -> Drafter:
        self.rows, self.tokens = torch.empty(0, self.head.shape[1]), []
        return self

    def draft(self, cache: DynamicCache, tokens: list[int], num_drafts: int) -> list[int]:
        self.rows = torch.cat([self.rows, self.project(len(tokens))])
        self.tokens = [*self.tokens, *tokens]
        fresh = Drafter(self.capture, lambda _: self.rows, self.embed, self.layer, self.head)
        return fresh.draft(DynamicCache(), self.tokens, num_drafts)


def test_the_drafters_cache_holds_what_a_fresh_pass_computes(checkpoint: Checkpoint) -> None:
    cached, drafts = assemble(checkpoint), {Drafter: [], Uncached: []}
    parts = {field.name: getattr(cached, field.name) for field in dataclasses.fields(cached)}
    for kind, record in drafts.items():
        for prompt in checkpoint.prompts:
            drafter = kind(**parts) if kind is Drafter else kind(**parts).begin()
            draft = drafter.draft
            drafter.draft = lambda *args, draft=draft, record=record: record.append(draft(*args)) or record[-1]
            speculate(checkpoint.target, drafter, prompt, COUNT, DRAFTS)
    assert drafts[Drafter] == drafts[Uncached]


def test_the_projection_is_the_one_that_was_trained(checkpoint: Checkpoint) -> None:
    """Our ops and the eager chain accept the same drafts on every prompt."""
    ours = assemble(checkpoint)
    eager = speculation.over_eager_chain(checkpoint, ours)
    for prompt in checkpoint.prompts[:3]:
        runs = [speculate(checkpoint.target, drafter, prompt, COUNT, DRAFTS) for drafter in (ours, eager)]
        assert runs[0].accepted == runs[1].accepted


def test_demo_prints_what_each_mistake_costs(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_STAGE_SECONDS", 0.0)
    assert main(["demo", "--tokens", str(COUNT)]) == 0
    printed = capsys.readouterr().out
    assert "equal to plain greedy decoding, token for token" in printed
    lengths = {name: float(length) for name, length in re.findall(r"^(\w.*?)  +(\d\.\d\d) +-?\d+ %$", printed, re.M)}
    right = lengths.pop("none")
    assert 3 < right <= DRAFTS + 1
    assert lengths.pop("none, eager chain") == lengths.pop("none, embedding over tp 2") == right
    assert set(lengths) == set(MISTAKES)
    assert all(length < right for length in lengths.values()), lengths
    assert printed.rstrip().endswith("%")


def test_demo_prints_what_each_format_costs(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_STAGE_SECONDS", 0.0)
    formats = "fp8_row,fp8_block32,fp8_block128,int8_row,nvfp4"
    assert main(["demo", "--tokens", str(COUNT), "--weights", formats]) == 0
    printed = capsys.readouterr().out
    assert "equal to plain greedy decoding, token for token" in printed
    rows = re.findall(r"^(\w+) +([\d.]+) +(\d\.\d\de[+-]\d\d) +(\d\.\d\d)$", printed, re.M)
    assert [name for name, *_ in rows] == ["fp32", *formats.split(",")]
    lengths = {name: float(length) for name, _, _, length in rows}
    errors = {name: float(error) for name, _, error, _ in rows}
    assert 0 < errors["int8_row"] < errors["fp8_row"] < errors["nvfp4"] < 0.15
    assert all(abs(length - lengths["fp32"]) < 0.5 for length in lengths.values()), lengths


def test_demo_exits_1_where_a_token_differs(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_STAGE_SECONDS", 0.0)
    monkeypatch.setattr(speculation, "generate", lambda checkpoint, prompt, count: [0] * count)
    assert main(["demo", "--tokens", "2"]) == 1
    assert "DIFFERS: none" in capsys.readouterr().out


def test_missing_weights_are_one_clear_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--model", str(tmp_path)])
    assert stopped.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.endswith("expected what examples/byte_eagle3/train.py writes") and "target/config.json" in sentence


def test_a_missing_package_is_one_clear_sentence() -> None:
    code = "import sys; sys.modules['transformers'] = None; from eagle_kernels.bench.cli import main; main(['demo'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    sentence = run.stderr.splitlines()[-1]
    assert "transformers" in sentence and sentence.endswith("pip install 'eagle-kernels[demo]'")
