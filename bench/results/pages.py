"""Write the sections of README and docs that show saved runs and facts of the code: `make report`, from a checkout.

A section is between `<!-- name -->` and `<!-- /name -->`. Tests compare every section with what is generated here.
Paths are relative to the root of the checkout, where this runs.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
from eagle_kernels.bench.measure import geometric_mean
from eagle_kernels.bench.runs import report, saved_run

from eagle_kernels import ops, plan
from eagle_kernels.checks import DTYPES
from eagle_kernels.engines import sglang, vllm
from eagle_kernels.engines.gates import Target
from eagle_kernels.models import drafters, families
from eagle_kernels.models.family import EngineStage, ModelFamily, MTPStage

RESULTS = Path("bench/results")
VLLM_COMBINE = "vllm_combine.json"
NO_BENCH_RUNS: tuple[str, ...] = ("host.json", "host_launches.json", "fuzz.json", "soak.json", VLLM_COMBINE)
NO_BENCH_RUNS += ("device.json", "gpu_tests.json", "host_calls.json", "probes.json", "sanitizer.json")
# Of these a page shows a few numbers: rows of twelve columns fill no table.
NO_BENCH_RUNS += tuple(f"decode-curve-alternatives{which}.json" for which in ("", "-in-threes", "-cut"))
_VARIANT = "decode-curve-"  # then the setting; has tables after those of `decode-curve`, but no plot and no headline
# The formats of an op's weight. Gains of norms are not listed: they have the input's dtype or fp32.
_WEIGHTS = {
    "norm_concat_linear": "dense, the input's dtype; oneDNN's layout (`prepack`, CPU, bf16 fp16); FP8, INT8, MXFP8, "
    "MXFP4, NVFP4²; bf16 in 12 bits (exact; CPU)",
    "vocab_parallel_embedding": "dense shard",
}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def main() -> int:
    os.chdir(Path(__file__).resolve().parents[2])
    drawn = [path for path in saved_runs() if not path.name.startswith(_VARIANT)]
    report.render_files(drawn, plots=True)  # each beside its file
    for page, sections in pages().items():
        text = Path(page).read_text(encoding="utf-8")
        for name, section in sections.items():
            text = replace_section(text, name, section)
        Path(page).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, dict[str, str]]:
    """The generated sections of every page."""
    runs = saved_runs()
    return {
        "README.md": {"headline": headline(runs), "support": support(), "engines": engines()},
        "docs/results.md": {
            "summary": summary(runs),
            "cpu": tables(runs, "cpu"),
            "cuda": tables(runs, "cuda"),
            "host": host(),
            "host-launches": host_launches(),
            "demo": demo(),
        },
        "docs/sglang.md": {"hooks": sglang_hooks()},
        "docs/vllm.md": {"hooks": vllm_hooks(), "combine": vllm_combine()},
        "docs/compatibility.md": {
            "matrix": matrix(),
            "sanitize": sanitizers(),
            "tiles": tiles(),
            "mutants": mutants(),
            "coverage": coverage(),
        },
        "docs/guarantees.md": {"runs": target_runs(), "links": links_to_tests()},
        "docs/models.md": {"drafters": served_drafters(), "mtp": mtp_stages()},
    }


def saved_runs() -> dict[Path, dict]:
    """What `bench --json` saved, the projection first."""
    paths = [path for path in RESULTS.glob("*/*.json") if path.name not in NO_BENCH_RUNS]
    paths.sort(key=lambda path: (not path.name.startswith("norm_concat_linear"), path.with_suffix("")))
    return {path: saved_run.load(path) for path in paths}


def section_of(text: str, name: str) -> str:
    """The text between the marks of this name; ValueError where there are none."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the page has no {begin.strip()} ... {end}")
    return text.partition(begin)[2].partition(end)[0]


def replace_section(text: str, name: str, section: str) -> str:
    """The page with this section between the marks."""
    old = f"<!-- {name} -->\n{section_of(text, name)}<!-- /{name} -->"
    return text.replace(old, f"<!-- {name} -->\n{section}<!-- /{name} -->")


def tables(runs: dict[Path, dict], device: str) -> str:
    """Every run of a device in full, with links as docs/results.md has them."""
    rendered = [report.render(path, run) for path, run in runs.items() if run["environment"]["device"] == device]
    return "\n".join(rendered).replace("](bench/", "](../bench/")


def headline(runs: dict[Path, dict]) -> str:
    """A line per op and dtype: how many times as fast as the eager chain each machine runs it, on a GPU in a graph. The
    geometric mean over all shapes and T, the least and the most."""
    shown: dict[str, dict[str, str]] = {}  # by machine and op
    for machine, records in _by_machine(runs).items():
        for (op, baseline), by_T in _speedups(records).items():
            if baseline in ("eager", "eager-out") and not op.endswith((", eager", ", spaced")):
                values = _of_all(by_T)
                cell = f"{geometric_mean(values):.2f}x ({min(values):.2f} to {max(values):.2f})"
                shown.setdefault(machine.rpartition(", torch ")[0], {})[op.removesuffix(", graph")] = cell
    lines = [f"| op | {' | '.join(shown)} |", "|---|" + "---:|" * len(shown)]
    for op in dict.fromkeys(op for cells in shown.values() for op in cells):
        lines.append(f"| {op} | {' | '.join(cells.get(op, '') for cells in shown.values())} |")
    return "\n".join(lines) + "\n"


def _of_all(by_T: dict[int, list[float]]) -> list[float]:
    return [value for values in by_T.values() for value in values]


def summary(runs: dict[Path, dict]) -> str:
    """A line per op, dtype and baseline: how many times faster the op is at each T, and the geometric mean."""
    lines = []
    for machine, records in _by_machine(runs).items():
        lines += [f"{machine}:", "", "| op | over | geometric mean | by T |", "|---|---|---:|---|"]
        for (op, baseline), by_T in _speedups(records).items():
            cells = [f"{geometric_mean(values):.2f}x at {T}" for T, values in sorted(by_T.items())]
            lines.append(f"| {op} | {baseline} | {geometric_mean(_of_all(by_T)):.2f}x | {', '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _by_machine(runs: dict[Path, dict]) -> dict[str, list[dict]]:
    machines: dict[str, list[dict]] = {}
    for path, run in runs.items():
        if path.name.startswith(_VARIANT):
            continue
        environment = run["environment"]
        machine = f"{report.machine(environment)}, torch {environment['torch']}"
        machines.setdefault(machine, []).extend(run["records"])
    return machines


def _speedups(records: Sequence[dict]) -> dict[tuple[str, str], dict[int, list[float]]]:
    """{(op, dtype and timer, baseline): {T: the speedups of all shapes}}."""
    speedups: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in saved_run.rows(records):
        ours = next((record for record in row if record["is_ours"]), None)
        if ours is None:
            continue
        for baseline in saved_run.headline_baselines(row):
            if (value := saved_run.speedup(row, ours["variant"], baseline)) is not None:
                timer = "" if ours["timer"] == "clock" else f", {ours['timer']}"
                key = (f"`{ours['op']}` {saved_run.dtypes(ours)}{timer}", baseline)
                speedups.setdefault(key, {}).setdefault(ours["T"], []).append(value)
    return speedups


def support() -> str:
    """Which backend runs which op on which dtypes, read off the tree and the plan, and which weights."""
    lines = ["| op | C++, CPU | CUDA C++ | Triton | plain torch | weight |", "|---|---|---|---|---|---|"]
    kernels = ("csrc/cpu/{}.cpp", "csrc/cuda/{}.cu", "triton_kernels/{}.py")
    for op in ops.__all__:
        cells = [_dtypes(op, kernel.format(op)) for kernel in kernels]
        lines.append("| " + " | ".join([f"`{op}`", *cells, "CPU, CUDA", _WEIGHTS.get(op, "none")]) + " |")
    return "\n".join(lines) + "\n"


def _dtypes(op: str, kernel: str) -> str:
    if not Path(kernel).is_file():
        return ""
    return " ".join(_SHORT[dtype] + ("¹" if _is_two_step(op, kernel, dtype) else "") for dtype in DTYPES)


def _is_two_step(op: str, kernel: str, dtype: torch.dtype) -> bool:
    """Whether even one row of friendly sizes takes norm_concat and a library's product."""
    if op != "norm_concat_linear" or not kernel.endswith(".cu"):
        return False
    problem = plan.Problem(op, torch.device("cuda"), 3, 1, dtype, 4096, (4096,))
    return plan.cuda_product_unsupported_reason(problem) is not None


def engines() -> str:
    """The parts of each plugin and the versions of the engine that it was tested in."""
    lines = ["| engine | tested in | parts |", "|---|---|---|"]
    for name, engine in (("vLLM", vllm), ("SGLang", sglang)):
        parts = ", ".join(f"{part}{'' if on else ' (off by default)'}" for part, on in engine.PARTS.items())
        lines.append(f"| [{name}](docs/{name.lower()}.md) | {', '.join(engine.TESTED_VERSIONS)} | {parts} |")
    return "\n".join(lines) + "\n"


def sglang_hooks() -> str:
    """What each hook of the SGLang plugin needs of its target, and the versions whose body was read."""
    hooks = [(part, hook) for part in sglang.PARTS for hook in import_module(f"{sglang.__name__}.{part}").HOOKS]
    missing = {id(hook.target): "that it is not there" for _, hook in hooks if hook.kind == "ADD"}
    rows = [(part, hook.target, missing.get(id(hook.target), "its name")) for part, hook in hooks]
    predictors = {row.target.where: row.target for row in import_module(f"{sglang.__name__}.mtp").PREDICTORS}
    rows += [("mtp, by itself", target, "its name") for target in predictors.values()]
    return _hooks(rows, "sglang.srt.")


def vllm_hooks() -> str:
    """`sglang_hooks` for the vLLM plugin."""
    rows = [(part, target, "its name") for part, target in vllm_targets()]
    return _hooks(rows, "vllm.")


def vllm_targets() -> list[tuple[str, Target]]:
    """Every gate of the vLLM plugin, by part."""
    names = ("combine", "mtp", "layer0", "context", "embedding", "speculator")
    part = {name: import_module(f"{vllm.__name__}.{name}") for name in names}
    shared = import_module(f"{vllm.__name__}.registry").MODELS
    targets = [("combine", shared), *(("combine", target) for target in part["combine"].TARGETS)]
    targets += [("combine, layer0, on CPU", import_module(f"{vllm.__name__}.cpu_packing").PROCESS)]
    targets += [("zero_copy", target) for target in (part["speculator"].EAGLE, part["speculator"].DFLASH)]
    of_mtp = {target.where: target for layer in part["mtp"].LAYERS for target in layer.targets}
    targets += [("mtp", target) for target in (shared, *of_mtp.values())]
    targets += [("layer0", target) for layer in part["layer0"].LAYERS for target in layer.targets]
    targets += [("context", target) for target in part["context"].TARGETS]
    targets += [("scales", shared)]
    targets += [("mtp, layer0, embedding", target) for target in (vllm.VARIABLES, vllm.FACTORS)]
    return [*targets, ("embedding", part["embedding"].FORWARD), ("embedding", part["embedding"].REGISTERED)]


def _hooks(rows: Sequence[tuple[str, Target, str]], package: str) -> str:
    lines = [f"| part | target in `{package.removesuffix('.')}` | needs |", "|---|---|---|"]
    for part, target, otherwise in rows:
        versions = dict.fromkeys(version for read in target.bodies.values() for version in read)
        needs = [] if target.parameters is None else ["its parameters"]
        needs += [f"its body as in {', '.join(versions)}"] if target.bodies else []
        lines.append(f"| {part} | `{target.where.removeprefix(package)}` | {', '.join(needs) or otherwise} |")
    return "\n".join(lines) + "\n"


def vllm_combine() -> str:
    """combine_hidden_states in vLLM with the plugin and without, from every saved run of `make bench-vllm`."""
    lines = []
    for path in sorted(RESULTS.glob(f"*/{VLLM_COMBINE}")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        environment, sizes = saved["environment"], saved["sizes"]
        versions = f"vLLM {environment['vllm']}, torch {environment['torch']}"
        lines += [f"{report.machine(environment)}; {versions}; {environment['date']}.", ""]
        lines += [f"K={sizes['K']}, {sizes['dtype']}, medians in ms.", ""]
        lines += ["| norm | H | threads | T | vLLM | with the plugin | | its product alone | ran |"]
        lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---|"]
        for record in saved["records"]:
            off, on = record["off_ms"], record["on_ms"]
            cells = [record["norm"], record["H"], record["threads"], record["T"], _digits(off), _digits(on)]
            cells += [f"{off / on:.2f}x", _digits(record["product_ms"]), record["ran"]]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        source = path.as_posix()
        lines += ["", f"From [`{source}`](../{source}) by `make bench-vllm`.", ""]
    return "\n".join(lines)


def _digits(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def host() -> str:
    """What a call alone costs, from every saved host.json."""
    lines = []
    for path in sorted(RESULTS.glob("*/host.json")):
        saved = json.loads(path.read_text(encoding="utf-8"))
        environment = saved["environment"]
        lines += [f"{report.machine(environment)}; torch {environment['torch']}; {environment['date']}.", ""]
        lines += ["| call | ours us | the chain us | share |", "|---|---:|---:|---:|"]
        for record in saved["records"]:
            times = f"{record['ours_us']:.1f} | {record['chain_us']:.1f} | {record['share']:.2f}"
            lines.append(f"| `{record['call']}` | {times} |")
        source = path.as_posix()
        imported = f"`import eagle_kernels` takes {saved['import_ms']} ms beyond torch."
        lines += ["", imported, "", f"From [`{source}`](../{source}) by `eagle-kernels host`."]
    return "\n".join(lines) + "\n"


def host_launches() -> str:
    """What a call costs where nothing is launched, by backend: medians of single calls, from every rehearsal saved."""
    lines = []
    for path, saved in _saved("*/host_launches.json"):
        cells: dict[str, dict[str, str]] = {}
        for name, times in saved["microseconds"].items():
            test, _, parameters = name.removesuffix("]").partition("[")
            backend, _, case = parameters.partition("-")
            cells.setdefault(f"{test.removeprefix('test_')} {case}".strip(), {})[backend] = f"{times['median']:.1f}"
        lines += [_where(path, saved), "", "| call | CUDA us | Triton us |", "|---|---:|---:|"]
        lines += [f"| {call} | {of['cuda']} | {of['triton']} |" for call, of in cells.items() if "cuda" in of] + [""]
    return "\n".join(lines or ["No run is saved yet."]).rstrip("\n") + "\n"


def matrix() -> str:
    """The environments that one library ran in."""

    def row(record: dict) -> list[str]:
        return [record["torch"], record["triton"], record["python"], *_outcome(record)]

    return _verified("test-matrix", ["torch", "Triton", "Python", "passed", "skipped", "failed", "s"], row)


def sanitizers() -> str:
    def row(record: dict) -> list[str]:
        return [record["subject"], f"`{record['sanitizer']}`", *_outcome(record)]

    return _verified("sanitize", ["what", "under", "passed", "skipped", "failed", "s"], row)


def tiles() -> str:
    return _verified(
        "tiles", ["what", "passed", "skipped", "failed", "s"], lambda record: [record["subject"], *_outcome(record)]
    )


def mutants() -> str:
    """The score by file, and every survivor with its reason."""
    lines = []
    for path, saved in _saved("*/verify/mutants.json"):
        lines += [_where(path, saved), "", "| file | mutants | killed |", "|---|---:|---:|"]
        records = _of_files_here(saved["records"])
        for file in dict.fromkeys(record["file"] for record in records):
            killed = [record["killed"] for record in records if record["file"] == file]
            lines.append(f"| `{file}` | {len(killed)} | {sum(killed)} |")
        survivors = [record for record in records if not record["killed"]]
        lines += ["", f"{len(records) - len(survivors)} of {len(records)} are killed.", ""]
        for mutant in survivors:
            lines.append(f"- `{mutant['original']}` as `{mutant['fault']}` survives: {mutant['survives']}.")
    return "\n".join(lines or ["No run is saved yet."]).rstrip("\n") + "\n"


def coverage() -> str:
    """What share of each file's lines ran, and which did not."""

    def row(record: dict) -> list[str]:
        share = record["covered"] / max(record["lines"], 1)
        return [f"`{record['file']}`", str(record["lines"]), f"{share:.0%}", record["missing"]]

    return _verified("coverage", ["file", "lines", "ran", "did not run"], row)


def _outcome(record: dict) -> list[str]:
    return [*(str(record[field]) for field in ("passed", "skipped", "failed")), f"{record['seconds']:.0f}"]


def _saved(pattern: str) -> list[tuple[Path, dict]]:
    return [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob(pattern))]


def _where(path: Path, saved: dict) -> str:
    environment, source = saved["environment"], path.as_posix()
    when = f"{environment['date']}, commit {environment['commit']}"
    return f"{_machine(environment)}; {when}; [`{source}`](../{source})."


def _machine(environment: dict) -> str:
    facts = [environment["cpu_model"], f"{environment['cpu_cores']} cores", environment["cpu_isa"]]
    return ", ".join([*facts, f"torch {environment['torch']}"])


def _verified(name: str, columns: Sequence[str], row: Callable[[dict], list[str]]) -> str:
    lines = []
    for path, saved in _saved(f"*/verify/{name}.json"):
        lines += [_where(path, saved), "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(row(record)) + " |" for record in _of_files_here(saved["records"])] + [""]
    return "\n".join(lines or ["No run is saved yet."]).rstrip("\n") + "\n"


def _of_files_here(records: Sequence[dict]) -> list[dict]:
    """Without those of a file that is gone since the run."""
    return [record for record in records if Path(record.get("file", ".")).exists()]


def demo() -> str:
    """What `eagle-kernels demo` printed, as it is."""
    lines = []
    for path in sorted(RESULTS.glob("*/demo.txt")):
        source = path.as_posix()
        lines += ["```text", path.read_text(encoding="utf-8").rstrip("\n"), "```", ""]
        lines += [f"From [`{source}`](../{source}) by `eagle-kernels demo`."]
    return "\n".join(lines) + "\n"


def target_runs() -> str:
    """The last run of each target that verifies: a line per machine and set of paths, environment or sanitizer."""
    lines = ["| target | on each of | cases | failed | seconds | date |", "|---|---|---:|---:|---:|---|"]
    machines = []
    for target, (pattern, summary) in _TARGETS.items():
        for path, saved in _saved(pattern.format(target)):
            for what, cases, failed, seconds, date in summary(saved):
                lines.append(f"| `make {target}` | {what} | {cases:,} | {failed} | {seconds:.0f} | {date} |")
            machines.append(f"[`{path.as_posix()}`](../{path.as_posix()}): {_machine(saved['environment'])}.")
    return "\n".join([*lines, "", *machines]) + "\n"


def _of_counted(saved: dict) -> Iterator[tuple]:
    by_paths: dict[str, list[dict]] = {}
    for record in saved["records"].values():
        by_paths.setdefault(", ".join(record["paths"]), []).append(record)
    for paths, records in by_paths.items():
        cases, seconds = (sum(record[field] for record in records) for field in ("cases", "seconds"))
        failed = sum(not record["passed"] for record in records)
        yield paths, cases, failed, seconds, max(record["date"] for record in records)


def _of_sanitizers(saved: dict) -> Iterator[tuple]:
    for record in saved["records"]:
        yield f"{record['subject']}, `{record['sanitizer']}`", *_of_tests(saved, record)


def _of_tiles(saved: dict) -> Iterator[tuple]:
    for record in saved["records"]:
        yield record["subject"], *_of_tests(saved, record)


def _of_matrix(saved: dict) -> Iterator[tuple]:
    for record in saved["records"]:
        what = f"torch {record['torch']}, Triton {record['triton']}, Python {record['python']}"
        yield what, *_of_tests(saved, record)


def _of_mutants(saved: dict) -> Iterator[tuple]:
    records = saved["records"]
    unexplained = sum(not record["killed"] and not record["survives"] for record in records)
    yield "kernels, checks, planners", len(records), unexplained, saved["seconds"], saved["environment"]["date"]


def _of_coverage(saved: dict) -> Iterator[tuple]:
    yield "Python and C++", *_of_tests(saved, saved["tests"])


def _of_tests(saved: dict, outcome: dict) -> tuple:
    return outcome["passed"], outcome["failed"], outcome["seconds"], saved["environment"]["date"]


# The targets that save what they ran (tests/counted.py, tests/verify): the file's path, and the rows of one file.
_TARGETS: dict[str, tuple[str, Callable[[dict], Iterator[tuple]]]] = {
    "fuzz": ("*/{}.json", _of_counted),
    "soak": ("*/{}.json", _of_counted),
    "sanitize": ("*/verify/{}.json", _of_sanitizers),
    "tiles": ("*/verify/{}.json", _of_tiles),
    "test-matrix": ("*/verify/{}.json", _of_matrix),
    "mutants": ("*/verify/{}.json", _of_mutants),
    "coverage": ("*/verify/{}.json", _of_coverage),
}


def served_drafters() -> str:
    """Every drafter of each engine, and whether the plugin runs its input stage on our ops."""
    lines = ["| engine | drafter | in its registry | with the plugin |", "|---|---|---|---|"]
    for engine, rows in (("SGLang", drafters.SGLANG), ("vLLM", drafters.VLLM)):
        for row in rows:
            names = ", ".join(f"`{name}`" for name in row.architectures) or "any"
            lines.append(f"| {engine} | {row.title} | {names} | {_with_the_plugin(row)} |")
    return "\n".join(lines) + "\n"


def _with_the_plugin(row: drafters.Drafter) -> str:
    if not row.runs:
        return f"stays with the engine because {row.stays}"
    if not row.stays:
        return f"runs our op: {row.runs}"
    return f"runs our op in part: {row.runs}; stays: {row.stays}"


_LINEAR = {
    "Linear": "whole, never quantized",
    "ReplicatedLinear": "whole",
    "ColumnParallelLinear": "rows over the ranks",
    "RowParallelLinear": "columns over the ranks",
}


def mtp_stages() -> str:
    """The input stage of every MTP and EAGLE-1 family, and how each engine serves it."""
    lines = ["| family | concat | norms | its modules | SGLang | vLLM |", "|---|---|---|---|---|---|"]
    for family in families().values():
        if (stage := family.mtp) is None:
            continue
        cells = [family.title, _concat(stage), _norms(family), ", ".join(f"`{name}`" for name in stage.names)]
        cells += [_served(stage, stage.engines.get(engine)) for engine in ("sglang", "vllm")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _served(stage: MTPStage, engine: EngineStage | None) -> str:
    if engine is None:
        return "not served"
    weight = _LINEAR[engine.linear] + (", may be quantized" if engine.quantized else "")
    if engine.bias:
        weight += ", bias" if engine.bias is True else f", bias if `{engine.bias}`"
    chain = f"{engine.chain}, normed if `{stage.chain_field}`" if stage.chain_field else engine.chain
    more = ["position 0 zero"] * engine.zeroes_position_0 + ["compiled"] * engine.compiled
    return "; ".join([weight, chain, *more])


def _concat(stage: MTPStage) -> str:
    if stage.streams:
        return "none: e_proj(embedding) + h_proj(each stream)"
    embed = "embedding"
    if stage.embedding_scaled:
        embed += " * sqrt(H)"
    if stage.embedding_scale_field:
        embed += f" * `{stage.embedding_scale_field}`"
    if stage.embedding_prenormed:
        embed += " behind the target's norm"
    return ", ".join((embed, "hidden") if stage.order == "embed,hidden" else ("hidden", embed))


def _norms(family: ModelFamily) -> str:
    stage = family.mtp
    if stage is None or not stage.normed:
        return "none"
    gain = {0.0: "w", 1.0: "1 + w"}
    if stage.norm_offsets:
        name, offsets = stage.norm_offsets
        gains = ", ".join(f"{gain[offset]} if {value}" for value, offset in offsets.items() if value is not None)
        text = f"`{name}`: {gains}"
    else:
        text = gain[family.norm_offset]
    text += "; hidden over all streams" if stage.streams and stage.hnorm_over == "row" else ""
    return text + (f"; eps is `{stage.eps_field}`" if stage.eps_field != "rms_norm_eps" else "")


def links_to_tests() -> str:
    """Where each test is that docs/guarantees.md names; ValueError for one that is not there."""
    named = re.findall(r"\[([\w/]+)::(test_\w+)\]", Path("docs/guarantees.md").read_text(encoding="utf-8"))
    for file, test in dict.fromkeys(named):
        path = Path("tests", f"{file}.py")
        if not path.is_file() or f"\ndef {test}(" not in path.read_text(encoding="utf-8"):
            raise ValueError(f"docs/guarantees.md names {file}::{test}, and {path} has no such test")
    lines = [f"[{file}::{test}]: ../tests/{file}.py" for file, test in sorted(set(named))]
    return "\n".join(["", *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
