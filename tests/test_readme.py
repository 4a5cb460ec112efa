"""The README's example runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def test_drop_in_example(capsys: pytest.CaptureFixture) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, README.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([16, 4096]) norm_concat_linear: ")
