"""The structure of the benchmark: few modules, imports without circles, and what stays out of the package."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from eagle_kernels.bench import cli

BENCH = Path(__file__).resolve().parent.parent / "bench"
PACKAGE = "eagle_kernels.bench"
MAX_MODULES = 17
ROOMS = ("doctor", "ops", "runs")  # one file per kind of drafter, one per op, and one per command on saved runs


def imports_of(source: str, package: str, modules: set[str]) -> set[str]:
    """The modules of `package` that a source imports, anywhere in it: a circle behind a lazy import is one too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            home = "." * node.level + (node.module or "")
            names = [f"{home}.{alias.name}" if node.module else home + alias.name for alias in node.names]
            paths = [home, *names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        else:
            continue
        for path in paths:
            inside = path.removeprefix(package + ".") if path.startswith(package + ".") else path
            if inside.startswith(".") or inside != path:
                found.add(inside.lstrip(".").partition(".")[0])
    return found & modules


def graph_of(folder: Path) -> dict[str, set[str]]:
    """For each module what it imports; the files of a folder in ROOMS count as one module."""
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.stem != "__init__"}
    graph = {name: imports_of(source, PACKAGE, {*sources, *ROOMS}) for name, source in sources.items()}
    for room in ROOMS:
        graph[room] = set()
        for path in (folder / room).glob("*.py"):
            graph[room] |= imports_of(path.read_text(encoding="utf-8"), PACKAGE, set(sources))
    return graph


def test_a_circle_would_be_seen() -> None:
    modules = {"cli", "info"}
    for source in (
        "from . import cli",
        "from .cli import main",
        "def f():\n    from .cli import main",
        "import eagle_kernels.bench.cli",
        "from eagle_kernels.bench import cli",
        "from eagle_kernels.bench.cli import main",
    ):
        assert imports_of(source, PACKAGE, modules) == {"cli"}, source
    assert imports_of("import info\nfrom eagle_kernels import info", PACKAGE, modules) == set()


def test_few_modules_without_circles() -> None:
    graph = graph_of(BENCH)
    assert len(graph) <= MAX_MODULES, sorted(graph)
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert set(order) == set(graph)
    assert graph["measure"] == graph["accuracy"] == set()  # the lowest layer


def test_every_module_serves_the_command_line() -> None:
    """The package has no module that no command reaches."""
    graph, reached, new = graph_of(BENCH), set(), {"cli"}
    while new:
        reached |= new
        new = set().union(*(graph[name] for name in new)) - reached
    assert reached == set(graph)


def test_the_package_never_reaches_for_a_checkouts_scripts() -> None:
    for path in BENCH.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith(("gpu", "results", "tests")), path.name


def test_the_parser_is_built_without_optional_packages() -> None:
    """Only code that needs matplotlib or transformers imports them: a bare install has neither."""
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['transformers'] = None\n"
        "from eagle_kernels.bench import cli; cli.build_parser(); print(len(cli._COMMANDS))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == len(cli._COMMANDS)
