"""What the compile gate compiles, and its table: a summary in the terminal, every binary in build/compile/."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from compile.offline import Launch, Row


@pytest.fixture
def selected(request: pytest.FixtureRequest) -> Callable[[Mapping[str, "Launch"]], Mapping[str, "Launch"]]:
    """Which of these launches, by case, to compile."""
    from compile.representatives import representatives

    return dict if request.config.option.all_binaries else representatives


@pytest.fixture
def record_binary(record_property: Callable[[str, object], None]) -> Callable[["Row"], None]:
    """Puts a row into the table, from whichever worker."""
    return lambda row: record_property("binary", asdict(row))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    recorded = [value for report in reports if report.when == "call" for name, value in report.user_properties
                if name == "binary"]  # fmt: skip
    for table in (value for report in reports for name, value in report.user_properties if name == "instances"):
        terminalreporter.section("norm_concat_linear's CUDA instances, and a fit: docs/benchmarking.md")
        terminalreporter.write_line(table)
    if not recorded:
        return
    import triton

    from compile.offline import Row, save, summary

    rows = [Row.of(values) for values in recorded]
    extent = "" if config.option.all_binaries else " that stand for the rest (make test-compile has every one)"
    path = config.rootpath / "build" / "compile" / f"triton-{triton.__version__}.json"
    save(rows, path)
    terminalreporter.section(f"Triton {triton.__version__}: {len(rows)} binaries{extent}, all in {path}")
    terminalreporter.write_line(summary(rows))
