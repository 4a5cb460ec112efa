"""A pytest plugin for the tests whose number of cases is an option: `make fuzz` and `make soak` ask for many and save
what ran under bench/results/, `make test` runs a few of each."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from eagle_kernels.bench.info import read_environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RESULTS = Path(__file__).resolve().parent.parent / "bench/results"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("counted")
    group.addoption("--cases", type=int, help="cases of each counted test; drawn anew each time, where they are random")
    group.addoption("--save-run", metavar="NAME", help="keep what ran in bench/results/<machine>/NAME.json")


@pytest.fixture
def cases(request: pytest.FixtureRequest, record_property: Callable) -> Callable[[int], int]:
    """How many cases to run: --cases, or the few that the test asks for. A test that passes has run them all."""

    def number(few: int) -> int:
        asked = request.config.getoption("--cases")
        record_property("cases", few if asked is None else asked)
        return few if asked is None else asked

    return number


@pytest.fixture
def for_any(request: pytest.FixtureRequest, cases: Callable[[int], int]) -> Callable:
    """Runs a function on examples that hypothesis draws: the same ones every time, unless --cases asks for a number.
    With --cases, failures are kept in .hypothesis/examples and come first the next time."""

    def run(function: Callable[[st.DataObject], None], few: int) -> None:
        function.__name__ = re.sub(
            r"\W", "_", request.node.nodeid
        )  # the key under which hypothesis keeps its failures; no other test may share it
        fixed = request.config.getoption("--cases") is None
        options = {"max_examples": cases(few), "derandomize": fixed, "deadline": None}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # calls this small take four times as long with a second thread, which only waits
        try:
            settings(**options, suppress_health_check=list(HealthCheck))(given(st.data())(function))()
        finally:
            torch.set_num_threads(threads)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After the last test: what ran and how long, by test; the tests of an earlier run stay in the file."""
    if (name := config.getoption("--save-run")) is None:
        return
    environment = read_environment("cpu")
    path = RESULTS / environment["device_slug"] / f"{name}.json"
    records = json.loads(path.read_text("utf-8"))["records"] if path.exists() else {}
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        facts = dict(report.user_properties)
        if report.when == "call" and "cases" in facts:
            run = {"passed": report.passed, "seconds": round(report.duration, 1)}
            records[report.nodeid] = facts | run | {name: environment[name] for name in ("commit", "date")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment, "records": records}, indent=1) + "\n", "utf-8")
