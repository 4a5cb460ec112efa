"""README and docs: every block of Python runs by itself, every command line parses, tables and figure are current."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from eagle_kernels.bench.cli import build_parser
from eagle_kernels.bench.results import pages
from sybil import Example, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

import eagle_kernels
from eagle_kernels import environment
from eagle_kernels.engines import sglang, vllm
from eagle_kernels.quantized_weight import FORMATS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/*.md"))]


def blocks() -> list:
    parsed = [(page, Sybil([PythonCodeBlockParser()]).parse(page)) for page in PAGES]
    return [
        pytest.param(example, id=f"{page.relative_to(ROOT)}:{example.line}")
        for page, document in parsed
        for example in document.examples()
    ]


def commands() -> list:
    lines = [(page, line) for page in PAGES for line in page.read_text("utf-8").splitlines()]
    found = [(page, line) for page, line in lines if line.startswith("eagle-kernels ")]
    return [pytest.param(line, id=f"{page.relative_to(ROOT)}:{line.partition('#')[0].strip()}") for page, line in found]


@pytest.mark.parametrize("example", blocks())
def test_block_runs_as_typed(example: Example, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs by itself; a comment after a print says what it prints, up to three dots."""
    for module in ("transformers", "kernels"):
        if re.search(rf"^(from|import) .*\b{module}\b", example.parsed, re.M):
            pytest.importorskip(module)
    if "replace_kernel_forward_from_hub" in example.parsed:  # which marks a class for the whole process
        modeling_llama = importlib.import_module("transformers.models.llama.modeling_llama")
        for name in ("kernel_layer_name", "kernel_condition"):
            monkeypatch.setattr(modeling_llama.LlamaRMSNorm, name, None, raising=False)
    example.document.namespace.clear()
    example.evaluate()
    printed = capsys.readouterr().out.splitlines()
    stated = re.findall(r"^ *print\(.*\)  # (.+)$", example.parsed, re.M)
    assert len(printed) == len(stated)
    for line, statement in zip(printed, stated, strict=True):
        start, dots, _ = statement.partition("...")
        assert line.startswith(start) if dots else line == statement


@pytest.mark.parametrize("line", commands())
def test_command_parses(line: str) -> None:
    build_parser().parse_args(shlex.split(line, comments=True)[1:])


GENERATED = ("results", "guarantees", "compatibility", "vllm", "sglang", "models")


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{name}.md" for name in GENERATED)])
def test_generated_sections_are_current(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make report` writes them, from saved runs and from the code; whoever edits one of the two is told here."""
    monkeypatch.chdir(ROOT)
    text = Path(page).read_text("utf-8")
    for name, section in pages.pages()[page].items():
        assert pages.section_of(text, name) == section, f"{page}, {name}: run `make report`"


def test_the_table_of_formats_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8_block32 was missing: the saved run was older than the format."""
    monkeypatch.chdir(ROOT)
    rows = pages.demo().partition("\nfc.weight ")[2].partition("```")[0].splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["fp32", *FORMATS]


def test_section_is_replaced() -> None:
    page = "before\n<!-- cpu -->\nold\n<!-- /cpu -->\nafter\n"
    replaced = pages.replace_section(page, "cpu", "new\n")
    assert replaced == "before\n<!-- cpu -->\nnew\n<!-- /cpu -->\nafter\n"
    assert pages.section_of(replaced, "cpu") == "new\n"
    with pytest.raises(ValueError, match="the page has no <!-- cuda -->"):
        pages.replace_section(page, "cuda", "new\n")


def test_a_guarantee_names_a_test_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    Path("docs/guarantees.md").write_text("| held | [test_pages::test_citation_has_the_version] |\n", "utf-8")
    assert pages.links_to_tests() == "\n[test_pages::test_citation_has_the_version]: ../tests/test_pages.py\n"
    for name in ("test_pages::test_of_nothing", "test_nowhere::test_citation_has_the_version"):
        Path("docs/guarantees.md").write_text(f"[{name}]", "utf-8")
        with pytest.raises(ValueError, match=f"names {name}, and"):
            pages.links_to_tests()


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_figure_is_current(tmp_path: Path) -> None:
    """Compares the texts, numbers included: paths differ in the last digit between versions of matplotlib."""
    pytest.importorskip("matplotlib")
    script = ROOT / "docs/input_stage.py"
    specification = importlib.util.spec_from_file_location("input_stage", script)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    module.save(tmp_path / "new.svg")
    drawn = texts((tmp_path / "new.svg").read_text("utf-8"))
    assert drawn == texts(script.with_suffix(".svg").read_text("utf-8"))
    (limit,) = re.findall(r"kMaxDecodeRows = (\d+);", (ROOT / "csrc/norm_concat_linear.h").read_text("utf-8"))
    assert f"the op, up to {limit} rows on sm_90 and later: 1 kernel launch" in "\n".join(drawn)
    assert f"{drawn[0].partition(': ')[2].partition(' ')[0]} launches" in (ROOT / "docs/vllm.md").read_text("utf-8")


def test_reference_has_every_environment_variable() -> None:
    reference = (ROOT / "docs/reference.md").read_text("utf-8")
    tables = environment.__doc__ + (ROOT / "setup.py").read_text("utf-8").partition("\nimport ")[0]
    for name in sorted(set(re.findall(r"EAGLE_KERNELS_[A-Z_]+[A-Z]\b", tables))):
        assert f"`{name}`" in reference, name
    for engine, plugin in (("VLLM", vllm), ("SGLANG", sglang)):
        rows = [line for line in reference.splitlines() if line.startswith(f"| `EAGLE_KERNELS_{engine}_")]
        named = set(re.findall(r"_([A-Z_0-9]+)`", "\n".join(rows).replace(f"EAGLE_KERNELS_{engine}", "")))
        assert named == {part.upper() for part in plugin.PARTS | plugin.OPTIONS}


def test_citation_has_the_version() -> None:
    assert f"version: {eagle_kernels.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
