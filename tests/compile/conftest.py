"""The compile gate's table: a summary in the terminal, every binary in build/compile/."""

import pytest

_ROWS = pytest.StashKey[list]()


@pytest.fixture(scope="session")
def resource_table(pytestconfig: pytest.Config) -> list:
    """Append an `offline.Row` for each binary."""
    return pytestconfig.stash.setdefault(_ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    import triton

    from compile.offline import save, summary

    path = config.rootpath / "build" / "compile" / f"triton-{triton.__version__}.json"
    save(rows, path)
    terminalreporter.section(f"Triton {triton.__version__}: {len(rows)} binaries, all in {path}")
    terminalreporter.write_line(summary(rows))
