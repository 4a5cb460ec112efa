"""What `make sanitize`, `test-matrix`, `mutants` and `coverage` are made of; the targets themselves run for minutes."""

import os
from pathlib import Path

import pytest

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


def test_missing_lines_are_ranges() -> None:
    assert line_coverage.ranges([7, 1, 3, 2, 9, 10]) == "1-3, 7, 9-10"
    assert line_coverage.ranges([]) == ""


def test_a_variants_package_comes_before_the_checkouts(tmp_path: Path) -> None:
    environment = variant.Variant(tmp_path / "source", tmp_path / "site").environment()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == os.fspath(tmp_path / "site")
