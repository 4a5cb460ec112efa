"""The examples of the README and of docs/ run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_drop_in_example(capsys: pytest.CaptureFixture) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, README.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([16, 4096]) norm_concat_linear: ")


def test_captured_layers_of_a_transformers_model(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    page = README.parent / "docs/transformers.md"
    example = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    exec(compile(example, page.name, "exec"), {})
    assert capsys.readouterr().out == "torch.Size([5, 192])\n"
