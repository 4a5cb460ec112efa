"""What `make sanitize`, `test-matrix`, `mutants` and `coverage` are made of; the targets themselves run for minutes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sanitizers import COMPILER
from verify import core, line_coverage, mutants, variant

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: f"{mutant.file}-{mutant.original}")
def test_every_mutant_has_one_place_and_tests(mutant: mutants.Mutant) -> None:
    assert mutants.occurrences(mutant) >= mutant.place if mutant.place else mutants.occurrences(mutant) == 1
    assert mutant.fault != mutant.original
    if mutant.file.startswith("csrc/"):
        assert ";" not in mutant.original + mutant.fault  # expressions: a statement does not compile
    assert mutants.TESTS[mutant.file]


def test_the_files_that_are_run_are_there() -> None:
    named = [*core.CORE, *line_coverage.TESTS, *(file for files in mutants.TESTS.values() for file in files)]
    assert [name for name in named if not (ROOT / name.partition("::")[0]).exists()] == []


def test_two_mutants_of_one_place_are_both_in_the_copy(tmp_path: Path) -> None:
    for file in {mutant.file for mutant in mutants.MUTANTS}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    mutants.insert(tmp_path)
    for number, mutant in enumerate(mutants.MUTANTS):
        if mutant.file.startswith("csrc/"):
            assert f"mutant == {number} ? ({mutant.fault}) :" in (tmp_path / mutant.file).read_text()


@pytest.mark.skipif(COMPILER is None, reason="g++ compiles the faults")
def test_every_fault_in_csrc_cuda_compiles(tmp_path: Path) -> None:
    """One that did not ended `make mutants` for all files of csrc/cuda, and nothing else noticed."""
    shutil.copytree(ROOT / "csrc", tmp_path / "source/csrc")
    mutants.insert(tmp_path / "source")
    (tmp_path / "mutant.h").write_text(mutants.HEADER)
    environment = os.environ | mutants.of_emulation(tmp_path) | {"PYTHONPATH": os.fspath(ROOT / "tests")}
    command = [sys.executable, "-c", "from cuda_host.build import check_syntax; check_syntax()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_missing_lines_are_ranges() -> None:
    assert line_coverage.ranges([7, 1, 3, 2, 9, 10]) == "1-3, 7, 9-10"
    assert line_coverage.ranges([]) == ""


def test_a_variants_package_comes_before_the_checkouts(tmp_path: Path) -> None:
    environment = variant.Variant(tmp_path / "source", tmp_path / "site").environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == os.fspath(tmp_path / "site")
