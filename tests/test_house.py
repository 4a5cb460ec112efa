"""The rules of docs/design.md: which way imports run, what kernels may know, what an op touches, what comments cite."""

import ast
import io
import re
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from eagle_kernels import ops

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/eagle_kernels"

# The rooms of docs/design.md, Layers: what each may import besides itself.
ROOMS = {
    "engines": {"layers", "ops", "data", "models", "ground"},
    "layers": {"ops", "data", "ground"},
    "ops": {"ground", "triton_kernels"},
    "data": {"models", "ground"},
    "ground": set(),
    "models": set(),
    "triton_kernels": set(),
}
ROOM_OF = {
    **dict.fromkeys(("engines", "ops", "models", "triton_kernels")),
    **dict.fromkeys(("layers", "mtp_projection", "mtp_streams", "eagle3_qkv_projection", "context_kv"), "layers"),
    **dict.fromkeys(("buffers", "packable_linear", "explain", "warmup"), "layers"),
    "quantized_linear": "layers",
    **dict.fromkeys(("drafter_config", "mtp_config", "model_shapes"), "data"),
    **dict.fromkeys(("checkpoint", "checkpoint_files", "stored_projection"), "data"),
    **dict.fromkeys(("quantized_checkpoint", "int4_checkpoint", "quantization_config"), "data"),
    **dict.fromkeys(("plan", "tuned_configs", "dispatch", "library", "checks", "environment"), "ground"),
    **dict.fromkeys(("version", "vocab_shard", "quantized_weight", "bf16_12bit", "huge_pages"), "ground"),
}

# The files that define an op, and the files of others that call it.
OWN_FILES = {
    "csrc/{op}.h",
    "csrc/{op}.cpp",
    "csrc/cpu/{op}.cpp",
    "csrc/cuda/{op}.cu",
    "triton_kernels/{op}.py",
    "python/eagle_kernels/ops/{op}.py",
    "python/eagle_kernels/ops/__init__.py",
    "bench/ops/{op}.py",
}
CLIENTS = {"add_rms_norm": {"python/eagle_kernels/buffers.py", "bench/gpu/stages.py"}}


def sources(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
    assert found
    return sorted(found)


def imports_of(path: Path, module: str) -> set[str]:
    """The dotted names that a module imports, anywhere in it; what `from a import b` imports is a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = module.split(".")[: -node.level] if node.level else []
            home += [node.module] if node.module else []
            found |= {".".join([*home, alias.name]) for alias in node.names}
    return found


def package_imports() -> dict[str, set[str]]:
    """For each module of the package what it imports of the package, all without the prefix."""
    found = {}
    for folder, prefix in ((PACKAGE, "eagle_kernels"), (ROOT / "triton_kernels", "eagle_kernels.triton_kernels")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            module = ".".join([prefix, *parts])
            inside = {name for name in imports_of(path, module) if name.startswith("eagle_kernels.")}
            found[module.removeprefix("eagle_kernels.")] = {name.removeprefix("eagle_kernels.") for name in inside}
    return found


def room_of(name: str) -> str:
    first = name.partition(".")[0]
    assert first in ROOM_OF, f"{first} has no room: name it in tests/test_house.py and in docs/design.md"
    return ROOM_OF[first] or first


def test_imports_run_one_way() -> None:
    for module, imported in package_imports().items():
        if module == "__init__":
            continue
        room = room_of(module)
        for name in imported:
            assert room_of(name) in {room, *ROOMS[room]}, f"{module} ({room}) imports {name} ({room_of(name)})"


def test_no_circles_below_the_engines() -> None:
    """Among a room's own modules too, and through lazy imports."""
    imports = {name: value for name, value in package_imports().items() if not name.startswith(("engines", "__init__"))}
    graph = {}
    for module, imported in imports.items():
        if not module.endswith("__init__"):
            homes = {name if name in imports else name.rpartition(".")[0] for name in imported}
            graph[module] = homes & set(imports)
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_triton_kernels_import_nothing_upwards() -> None:
    for path in sources("triton_kernels"):
        for name in imports_of(path, f"eagle_kernels.triton_kernels.{path.stem}"):
            assert not name.startswith("eagle_kernels") or name.startswith("eagle_kernels.triton_kernels."), path.name


def test_nothing_imports_the_benchmark() -> None:
    for path in sources("python", "triton_kernels"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).replace("python.", "")
        assert not any("bench" in name.split(".") for name in imports_of(path, module)), path


def test_kernels_and_records_know_no_torch() -> None:
    """csrc/<op>.cpp is where a tensor becomes a record; below it there are pointers."""
    records = {*(f"{op}.h" for op in ops.__all__), "concat.h", "dtype.h", "memory_bandwidth.h"}
    host_side = {"dispatch.h", "parallel.h", "isa.cpp", "current_device.cpp", "current_device.h"}
    for path in sources("csrc", suffixes=(".h", ".cpp", ".cu", ".cuh")):
        kept = path.name in records if path.parent.name == "csrc" else path.name not in host_side
        if kept:
            included = re.findall(r'#include [<"]([^>"]+)', path.read_text(encoding="utf-8"))
            assert not [name for name in included if "torch" in name or name in ("checks.h", "sources.h")], path


def test_lines_of_c_end_at_column_120() -> None:
    """The limit that ruff checks in Python; no tool formats these files."""
    for path in sources("csrc", "cmake", "tests", suffixes=(".h", ".c", ".cpp", ".cu", ".cuh")):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [f"{path}:{i}" for i, line in enumerate(lines, 1) if len(line) > 120]


def test_no_lambda_only_fetches() -> None:
    """GCC 12 drops calls of a function that only prefetches, as it did with one row of codes: 2.42 ms, not 2.01."""
    head, call = r"\[[&=]\]\([^()]*\)[^{};]*", r"(?:__builtin_prefetch|fetch\w*)\([^;]*;"
    alone = re.compile(head + r"\{\s*(?:for \([^{}]*\)\s*)?" + call + r"\s*\}")
    assert alone.search("[&](auto column, int64_t i) { __builtin_prefetch(later[column] + i * kCacheLine, 0, 2); }")
    for path in sources("csrc", suffixes=(".h", ".cpp")):
        assert not alone.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("op", CLIENTS)
def test_an_op_touches_eight_files(op: str) -> None:
    """Outside of tests, docs, examples and saved results; a file that calls it is a client."""
    camel = "".join(part.capitalize() for part in op.split("_"))
    named = re.compile(rf"(?<![a-z_]){op}|\b{camel}\b")
    folders = ("python", "triton_kernels", "csrc", "bench")
    files = sources(*folders, suffixes=(".py", ".h", ".cpp", ".cu", ".cuh", ".json", ".sh"))
    files += [ROOT / name for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "Makefile", ".ci/run")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "results" not in path.parts and named.search(path.read_text(encoding="utf-8"))
    }
    own = {name.format(op=op) for name in OWN_FILES}
    assert found == own | CLIENTS[op]
    assert len(own) <= 8


def test_every_op_has_its_files() -> None:
    for op in ops.__all__:
        for name in OWN_FILES:
            assert (ROOT / name.format(op=op)).is_file(), name.format(op=op)


def cited_pages(text: str) -> list[str]:
    return re.findall(r"(?<![\w*/.])[\w./-]*\w\.md\b", text)


def remarks(path: Path) -> str:
    """The comments and docstrings of a Python file; all text of any other file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return "\n".join(comments + docstrings)


def test_a_citation_is_seen() -> None:
    assert cited_pages("see docs/a.md, b.md: `c/d.md` and *.md, x.mdx") == ["docs/a.md", "b.md", "c/d.md"]
    assert "(docs/design.md, Errors)" in remarks(ROOT / "tests/test_errors.py")


def test_remarks_cite_what_the_tree_has() -> None:
    """A page is cited by its path from the root, and a heading after it must exist: (docs/design.md, Errors)."""
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.M)
    folders = ("python", "triton_kernels", "csrc", "bench", "tests", "examples")
    for path in sources(*folders, suffixes=(".py", ".h", ".cpp", ".cu", ".cuh", ".sh")):
        text = remarks(path)
        for page in cited_pages(text):
            assert (ROOT / page).is_file(), f"{path.relative_to(ROOT)} cites {page}"
        assert not re.search(r"\.md section \d", text), path
        for heading in re.findall(r"docs/design\.md, ([A-Z]\w*(?: \w+)*)", " ".join(text.split())):
            assert any(heading.startswith(known) for known in headings), f"{path.name} cites the heading {heading}"


def test_the_functions_below_torchs_public_api_are_listed() -> None:
    listed = set(re.findall(r"`([\w.]+)`", (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")))
    used = {
        f"torch._C.{name}"
        for path in sources("python", "triton_kernels")
        for name in re.findall(r"torch\._C(?:\.|, \")([\w.]*\w)", path.read_text(encoding="utf-8"))
    }
    shims = re.compile(r"aoti_torch_(?:cpu|cuda)_\w*\w|aoti_torch_get_current_cuda_stream")
    for path in sources("csrc", suffixes=(".h", ".cpp", ".cu", ".cuh")):
        used |= set(shims.findall(path.read_text(encoding="utf-8")))
    assert {"torch._C._nn.linear", "torch._C._cuda_getDevice", "aoti_torch_cuda_mm_out"} <= used
    of_torch = {name for name in listed if name.startswith(("torch._C.", "aoti_torch_"))}
    assert used == of_torch
