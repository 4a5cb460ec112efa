"""The examples of README and docs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_drop_in_example(capsys: pytest.CaptureFixture) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, README.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([16, 4096]) norm_concat_linear: ")


def test_examples_of_models() -> None:
    one_layer, chain = re.findall(r"```python\n(.*?)```", (ROOT / "docs/models.md").read_text("utf-8"), re.DOTALL)
    names: dict = {}
    exec(compile(one_layer, "models.md", "exec"), names)
    assert names["x"].shape == (2, 256)
    exec(compile(chain, "models.md", "exec"), names)
    assert names["ids"][[2, 3]].tolist() == names["drafted"].tolist()


def test_captured_layers_of_a_transformers_model(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    page = ROOT / "docs/transformers.md"
    example = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(example, page.name, "exec"), {})
    assert capsys.readouterr().out == "torch.Size([5, 192])\n"
