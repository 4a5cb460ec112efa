"""The CUDA timers on a stand-in for CUDA: what is captured and launched, and that a sample is one call's share."""

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle_kernels.bench import measure
from eagle_kernels.bench.cli import main
from eagle_kernels.bench.gpu import session
from eagle_kernels.bench.measure import Variant
from eagle_kernels.bench.results import pages
from eagle_kernels.bench.runs import saved_run
from eagle_kernels.bench.runs.saved_run import load
from torch.overrides import TorchFunctionMode

COPIES = 5


class FakeCuda:
    """Calls take time on a fake clock when they run, and none while a graph records them."""

    def __init__(self) -> None:
        self.now, self.recording, self.launched = 0.0, None, []

    def variant(self, name: str, seconds: float) -> Variant:
        def call(copy: int) -> None:
            if self.recording is not None:
                self.recording.calls.append((name, copy, seconds))
            else:
                self.launched.append((name, copy))
                self.now += seconds

        return Variant(name, call, COPIES)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Graph:
        def __init__(self) -> None:
            self.calls = []

        def replay(self) -> None:
            fake.launched += [(f"replayed {name}", copy) for name, copy, _ in self.calls]
            fake.now += sum(seconds for _, _, seconds in self.calls)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = fake.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) * 1e3

    class Stream:
        def wait_stream(self, other: "Stream") -> None:
            pass

    @contextlib.contextmanager
    def record(graph: Graph) -> Iterator[None]:
        fake.recording = graph
        yield
        fake.recording = None

    def spin(cycles: int) -> None:
        fake.now += 1.0  # far more than any call, to show in a sample if it were timed

    replaced = {"CUDAGraph": Graph, "Event": Event, "Stream": Stream, "graph": record, "_sleep": spin}
    replaced |= {"current_stream": Stream, "synchronize": lambda: None}
    replaced["stream"] = lambda stream: contextlib.nullcontext()
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return fake


@pytest.mark.parametrize("timer", ["graph", "eager"])
def test_a_sample_is_one_call(timer: str, cuda: FakeCuda) -> None:
    variants = [cuda.variant("fast", 1e-4), cuda.variant("slow", 3e-4)]
    fast, slow = measure.time_variants(timer, variants, COPIES, min_time=0.02)
    assert fast.median == pytest.approx(1e-4) and slow.median == pytest.approx(3e-4)
    assert max(slow.seconds) == pytest.approx(3e-4)


def test_a_spaced_sample_is_without_the_kernels_between_calls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_spacer", lambda: cuda.variant("space", 5e-4).call)
    fast, slow = measure.time_variants(
        "spaced", [cuda.variant("fast", 1e-4), cuda.variant("slow", 3e-4)], COPIES, min_time=0.02
    )
    assert fast.median == pytest.approx(1e-4) and slow.median == pytest.approx(3e-4)
    replayed = [(name, copy) for name, copy in cuda.launched if name.startswith("replayed")]
    at = replayed.index(("replayed fast", 0))
    alternating = [(f"replayed {name}", copy) for copy in range(COPIES) for name in ("fast", "space")]
    assert replayed[at : at + 2 * COPIES] == alternating


def test_a_graph_holds_every_copy_once(cuda: FakeCuda) -> None:
    measure.time_variants("graph", [cuda.variant("op", 1e-4)], COPIES, min_time=0.0)
    warm, replayed = cuda.launched[:COPIES], cuda.launched[COPIES:]
    assert warm == [("op", copy) for copy in range(COPIES)]
    assert replayed[:COPIES] == [("replayed op", copy) for copy in range(COPIES)]
    assert len(replayed) == COPIES * (5 + 7)  # the warm-up's replays, and the fewest rounds


def test_variants_alternate(cuda: FakeCuda) -> None:
    variants = [cuda.variant(name, 1e-4) for name in "ab"]
    prepared = [measure.prepare("graph", variant, COPIES) for variant in variants]
    cuda.launched.clear()
    measure.time_prepared("graph", prepared, COPIES, min_time=0.0)
    order = [name for name, copy in cuda.launched if copy == 0]
    assert order[:4] == ["replayed a", "replayed b", "replayed b", "replayed a"]


@pytest.mark.parametrize("timer", ["clock", "graph", "eager"])
def test_what_a_variant_activates_is_active_in_every_call(timer: str, cuda: FakeCuda) -> None:
    """A forced backend is active while its calls run or are captured, and for no other variant's."""
    active, seen = [False], []

    @contextlib.contextmanager
    def activate() -> Iterator[None]:
        active[0] = True
        yield
        active[0] = False

    forced = Variant("forced", lambda copy: seen.append(("forced", active[0])), COPIES, activate)
    free = Variant("free", lambda copy: seen.append(("free", active[0])), COPIES)
    measure.time_variants(timer, [forced, free], COPIES, min_time=0.0)
    assert set(seen) == {("forced", True), ("free", False)}


class OnCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = {
            name: "cpu" if isinstance(value, str) and value == "cuda" else value
            for name, value in (kwargs or {}).items()
        }
        return func(*("cpu" if isinstance(value, str) and value == "cuda" else value for value in args), **kwargs)


def test_the_whole_command_on_a_stand_in(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """All of the CUDA path except the device: header, rotation, gate, three timers, records, table."""
    processor = {"name": "NVIDIA Test GPU", "major": 9, "minor": 0, "multi_processor_count": 132, "uuid": "0"}
    properties = SimpleNamespace(**processor, total_memory=80 << 30, L2_cache_size=1 << 14)
    replaced = {"is_available": lambda: True, "get_device_properties": lambda device=0: properties}
    replaced |= {"get_device_name": lambda device=0: properties.name, "mem_get_info": lambda: (1 << 24, 1 << 30)}
    replaced["empty_cache"] = lambda: None
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(measure, "_SECONDS", {"cuda": 0.0})
    monkeypatch.setattr(measure, "_MATMUL", {"cuda": ((16, 64, 64),)})
    monkeypatch.setattr(saved_run, "_CEILING_LIMIT", math.inf)  # the times are this machine's, which may be busy
    monkeypatch.setattr(measure.torch.cuda.Event, "record", lambda event: setattr(event, "at", time.perf_counter()))
    path = tmp_path / "run.json"
    arguments = ["bench", "--op", "norm_concat_linear,capture_hidden", "--tokens", "1,3", "--min-time", "0"]
    arguments += ["--chunks", "3", "--hidden", "64", "--out", "48", "--baselines", "eager,slices,linear"]
    with OnCpu():
        assert main([*arguments, "--timer", "graph,eager,spaced", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    machine = "NVIDIA Test GPU (nvidia-test-gpu): sm_90, 132 multiprocessors, 80 GiB, last-level cache 0 MiB"
    assert machine in " ".join(printed.split())
    assert "clocks as read: " in printed and re.search(
        r"^ +T timer column +us +p20-p80 +speedup", printed, re.MULTILINE
    )
    run = load(path)
    assert run["environment"]["device"] == "cuda" and run["environment"]["device_slug"] == "nvidia-test-gpu"
    assert all(record["status"] == "ok" and record["copies"] <= 512 for record in run["records"])
    linear = [record for record in run["records"] if record["op"] == "norm_concat_linear"]
    columns = {(record["timer"], record["variant"]) for record in linear}
    names = ("op", "layer", "eager", "slices", "linear")
    assert columns == {(timer, name) for timer in ("graph", "eager", "spaced") for name in names}

    # From a GPU session's folder to the pages, in a folder of its own: no real page may have a run without a GPU.
    root, kept = tmp_path / "checkout", {"stage": "op-table", "status": "done", "output_tail": "", "result": None}
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "op-table.json").write_text(
        json.dumps(kept | {"result": {"run": json.loads(path.read_text())}})
    )
    monkeypatch.setattr(session, "ROOT", root)
    assert session.main(["--collect", str(tmp_path / "back")]) == 0
    monkeypatch.chdir(root)
    runs = pages.saved_runs()
    assert list(runs) == [Path("bench/results/nvidia-test-gpu/op-table.json")]
    tables = pages.tables(runs, "cuda")
    assert "NVIDIA Test GPU" in tables and pages.tables(runs, "cpu") == ""
    for timer in ("graph", "eager", "spaced"):
        assert re.search(rf"^\| 3 \| {timer} \|", tables, re.MULTILINE), timer
        assert f"| `norm_concat_linear` bf16, {timer} | eager | " in pages.summary(runs)
    title, _, row, *_ = pages.headline(runs).splitlines()
    assert title.startswith("| op | NVIDIA Test GPU, ") and re.match(r"\| `norm_concat_linear` bf16 \| .*x \(", row)
