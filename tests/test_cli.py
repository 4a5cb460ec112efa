"""The `eagle-kernels` command: what it prints, its exit codes, and its messages for bad input."""

import csv
import errno
import importlib.util
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from eagle_kernels.bench import baselines, benchmark, check, cli, cli_types, info, measure, output, workloads
from eagle_kernels.bench.baselines import BASELINES, FOREIGN, QUANTIZED
from eagle_kernels.bench.check import make_case
from eagle_kernels.bench.cli import main
from eagle_kernels.bench.ops import WORKLOADS, workload_of
from eagle_kernels.bench.ops.draw import Expected
from eagle_kernels.bench.runs import report, saved_run
from eagle_kernels.bench.runs.saved_run import load

import eagle_kernels as ek
from accuracy import relative_rms
from backends import CPU_ISAS, needs_compiled
from eagle_kernels import environment, library, ops, plan
from eagle_kernels.model_shapes import ContextCache, InputStage, ModelShape, model_shapes

MB = 1 << 20
BENCH = ["bench", "--device", "cpu"]
CACHE_BYTES = 64 << 10  # five copies of a tiny weight exceed it


@pytest.fixture
def tiny_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset and a cache so small that a benchmark takes a moment."""
    stage = InputStage("eagle3", 3, 64, 48, 1e-5, 0.0, "none", False, None, None)
    mtp = InputStage("mtp", 2, 64, 48, 1e-5, 1.0, "chunk", False, None, None)
    model = ModelShape("tiny", 64, 4, 1000, 1e-5, 0.0, True, (mtp, stage))
    monkeypatch.setattr(cli_types, "model_shapes", lambda: model_shapes() | {"tiny": model})
    facts = info.read_environment("cpu") | {"cache_bytes": CACHE_BYTES}
    monkeypatch.setattr(info, "read_environment", lambda device: dict(facts))
    monkeypatch.setattr(info, "available_bytes", lambda device: 512 * MB)
    monkeypatch.setattr(measure, "_SECONDS", {"cpu": 0.0})
    monkeypatch.setattr(measure, "_THREAD_BYTES", 1 << 20)
    # On a busy machine a call of 0.1 ms that waits for a second thread is slower than a tiny row on one.
    monkeypatch.setattr(saved_run, "_CEILING_LIMIT", math.inf)
    monkeypatch.setattr(measure, "_MATMUL", {"cpu": ((16, 64, 64),)})


def test_info_shows_versions_settings_and_plans(capsys: pytest.CaptureFixture) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"eagle-kernels +{re.escape(ek.__version__)}", printed)
    assert re.search(rf"torch +{re.escape(torch.__version__)}", printed)
    for name in ("EAGLE_KERNELS_BACKEND", "EAGLE_KERNELS_BATCH_INVARIANT", "EAGLE_KERNELS_CPU_ISA"):
        assert name in printed
    invariant = int(plan.SETTINGS.batch_invariant)
    assert f"EAGLE_KERNELS_BATCH_INVARIANT = {invariant}\n" in printed  # as it is set, not False
    for op in ops.__all__:
        assert re.search(rf"^  {op} .*(bf16|fp32)", printed, re.MULTILINE)
    assert re.search(r"EAGLE_KERNELS_VLLM, EAGLE_KERNELS_SGLANG +=", printed)  # settings of the plugins


def test_info_survives_a_backend_that_cannot_be_used(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "cuda")
    plan.clear()
    try:
        assert main(["info"]) == 0
    finally:
        monkeypatch.undo()
        plan.clear()
    assert "EAGLE_KERNELS_BACKEND is 'cuda'" in capsys.readouterr().out


def test_check_passes_on_every_backend(capsys: pytest.CaptureFixture) -> None:
    before = plan.SETTINGS
    assert main(["check", "--cases", "6", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    for op in ops.__all__:
        assert re.search(rf"{op} +reference +- .* 6 ok", printed)
        if library.unsupported_reason is None:
            assert re.search(rf"{op} +cpu +scalar .* 6 ok", printed)
    assert before == plan.SETTINGS


def scaled(op: Callable) -> Callable:
    def broken(*args: object, **options: object) -> object:
        result = op(*args, **options)
        result[0].mul_(1.01) if isinstance(result, tuple) else result.mul_(1.01)
        return result

    return broken


def beside_out(op: Callable) -> Callable:
    def broken(*args: object, **options: object) -> object:
        result = op(*args, **options)
        for name in ("out", "out_sum"):
            if name in options:
                whole = torch.empty(0, dtype=options[name].dtype).set_(options[name].untyped_storage())
                whole[-1] = 0
        return result

    return broken


def not_a_number(op: Callable) -> Callable:
    def broken(*args: object, **options: object) -> object:
        result = op(*args, **options)
        (result[0] if isinstance(result, tuple) else result).view(-1)[:1].fill_(float("nan"))
        return result

    return broken


def raising(op: Callable) -> Callable:
    def broken(*args: object, **options: object) -> object:
        raise RuntimeError("broken on purpose")

    return broken


@pytest.mark.parametrize("op", ops.__all__)
@pytest.mark.parametrize(
    "damage, text",
    [(scaled, "differs"), (beside_out, "memory beside an output was written"), (raising, "broken on purpose")],
    ids=["1-percent-off", "writes-beside-out", "raises"],
)
def test_check_catches_a_broken_op(
    op: str, damage: Callable, text: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ek, op, damage(getattr(ek, op)))
    assert main(["check", "--op", op, "--backend", "reference", "--cases", "12"]) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed and text in printed
    repro = re.search(r"repro: eagle-kernels (.*)", printed).group(1)
    assert main(repro.split()) == 1
    assert "1 of 1 FAIL" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(repro.split()) == 0


def test_check_catches_a_nan(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ek, "norm_concat", not_a_number(ek.norm_concat))
    assert main(["check", "--op", "norm_concat", "--backend", "reference", "--cases", "12"]) == 1
    assert "result differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("actual", "bound", "ratio"),
    [
        ([3.0, 4.5], 0.2, 0.5),
        ([3.0, 4.5], 0.05, 2.0),
        ([3.0, 4.0], 0.0, 0.0),
        ([3.0, 4.5], 0.0, math.inf),
        ([3.0, 4.5], None, math.inf),
        ([3.0, 4.0], None, 0.0),
        ([3.0, math.nan], 0.2, math.inf),
        ([3.0, math.inf], 0.2, math.inf),
        ([[3.0, 4.0]], 0.2, math.inf),
    ],
    ids=str,
)
def test_an_error_is_judged_by_its_bound(actual: list, bound: float | None, ratio: float) -> None:
    """None: the bits have to be right."""
    expected = Expected("result", torch.tensor([3.0, 4.0]), bound)
    assert check._judge(expected, torch.tensor(actual)).ratio == pytest.approx(ratio)


def test_every_output_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ek.add_rms_norm

    def with_another_sum(*arguments: object, **options: object) -> object:
        normed, total = op(*arguments, **options)
        return normed, total.add_(1)

    monkeypatch.setattr(ek, "add_rms_norm", with_another_sum)
    assert check._run_case("add_rms_norm", 0, 1).text == "sum differs"


@pytest.mark.parametrize(
    ("outcomes", "worst", "verdict"),
    [
        ([(0.0, 0.0, 0.0)] * 2, "bit for bit", "2 ok"),
        ([(0.0, 0.0, 0.0), (1.0, 2e-3, 2e-3)], "2.00e-03 / 2.00e-03", "2 ok"),
        ([(0.5, 1e-3, 2e-3), (1.2, 2.4e-3, 2e-3), (0.0, 0.0, 0.0)], "2.40e-03 / 2.00e-03", "1 of 3 FAIL"),
        ([(0.5, 1e-3, 2e-3), (math.inf, math.inf, 0.0)], "inf / 0.00e+00", "1 of 2 FAIL"),
    ],
    ids=["exact", "at-the-bound", "above-it", "other-bits"],
)
def test_check_counts_what_is_above_its_bound(
    outcomes: list[tuple], worst: str, verdict: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_run_case", lambda op, seed, number: check.Outcome(*outcomes[number], "differs"))
    path = check.Path("norm_concat", "reference", None)
    assert check._check_path(path, 0, range(len(outcomes))) == verdict.endswith("ok")
    line, *repro = capsys.readouterr().out.splitlines()
    assert line.split("-", 1)[1].split() == [*worst.split(), *verdict.split()]
    assert repro == [] or repro[-1].endswith(" --case 1")


def paths_of_calls(monkeypatch: pytest.MonkeyPatch, broken: Callable[[str], bool] = lambda isa: False) -> list[tuple]:
    """(backend, instruction set) of each call of add_rms_norm from here on, which raises where it is broken."""
    op, calls = ek.add_rms_norm, []

    def noted(*arguments: object, **options: object) -> object:
        calls.append((plan.SETTINGS.backend, plan.cpu_isa() if plan.SETTINGS.backend == "cpu" else None))
        if broken(calls[-1][1]):
            raise RuntimeError("broken on purpose")
        return op(*arguments, **options)

    monkeypatch.setattr(ek, "add_rms_norm", noted)
    return calls


@needs_compiled
def test_check_runs_each_instruction_set_or_the_one_asked_for(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = paths_of_calls(monkeypatch)
    assert main(["check", "--op", "add_rms_norm", "--case", "7", "--cases", "3"]) == 0
    assert calls == [*(("cpu", isa) for isa in CPU_ISAS), ("reference", None)]
    printed = capsys.readouterr().out
    assert "seed 0, 1 for each line" in printed and not any(f"\n{op} " in printed for op in ops.__all__[:-1])
    calls.clear()
    assert main(["check", "--op", "add_rms_norm", "--backend", "cpu", "--isa", CPU_ISAS[-1]]) == 0
    assert calls == [("cpu", CPU_ISAS[-1])] * 40
    assert "40 for each line" in capsys.readouterr().out


@needs_compiled
def test_a_failure_on_one_instruction_set_is_repeatable(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what runs after it is right."""
    calls = paths_of_calls(monkeypatch, broken=lambda isa: isa == CPU_ISAS[0])
    assert main(["check", "--op", "add_rms_norm", "--cases", "2", "--seed", "5"]) == 1
    repro = re.search(r"repro: eagle-kernels (.*)", capsys.readouterr().out).group(1)
    assert f"--backend cpu --isa {CPU_ISAS[0]} --seed 5 --case 0" in repro and calls[-1] == ("reference", None)
    assert main(repro.split()) == 1


def test_cases_are_repeatable() -> None:
    for op in ops.__all__:
        (first, call), (second, same) = make_case(op, 5, 2), make_case(op, 5, 2)
        assert first.drawn == second.drawn
        for expected, again in zip(call.expected, same.expected, strict=True):
            assert torch.equal(expected.value, again.value)
        assert first.drawn != make_case(op, 6, 2)[0].drawn


def test_cases_reach_every_option() -> None:
    """All that a caller may vary (docs/design.md, Arguments) is varied within the first 60 cases."""
    drawn: dict[str, set] = {}
    for number in range(60):
        for name, value in make_case("norm_concat_linear", 0, number)[0].drawn.items():
            drawn.setdefault(name, set()).add(str(value))
    assert drawn["dtype"] == {"bf16", "fp16", "fp32"}
    assert drawn["norm"] == {"chunk", "concat", "none"}
    assert drawn["layout"] == {"list", "packed", "unequal", "one row"}
    assert drawn["indices"] == {"none", "one", "per chunk"}
    assert drawn["residuals"] == {"none", "some", "all"}
    assert {"0", "1"} <= drawn["T"]
    for name in ("bias", "post_norm", "sum_squares", "out", "mixed", "weight_rows_apart"):
        assert drawn[name] == {"False", "True"}, name


@pytest.mark.parametrize("op", ["all", "norm_concat_linear"])
def test_bench_measures_and_saves(op: str, tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--op", op, "--preset", "tiny", "--tokens", "1,5", "--dtype", "bf16,fp32"]
    arguments += ["--forms", "op,layer", "--min-time", "0", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "torch " + torch.__version__ in printed
    assert "geomean op: " in printed
    assert "repro: eagle-kernels bench --device cpu --op" in printed
    run = load(path)
    json.dumps(run, allow_nan=False)
    assert run["argv"] == arguments
    for record in run["records"]:
        assert record["status"] == "ok", record
        assert record["cold"] and record["rotated_bytes"] > CACHE_BYTES
        assert record["error"] <= record["error_bound"]
        assert 0 < record["min_ms"] <= record["median_ms"]
    linear = [record for record in run["records"] if record["op"] == "norm_concat_linear"]
    assert {record["variant"] for record in linear} == {"op", "layer", "eager"}
    assert {record["norm"] for record in linear} == {"chunk"}
    measured = {record["op"] for record in run["records"]}
    assert measured == (set(ops.__all__) if op == "all" else {op})


CONTEXT = ContextCache(num_layers=2, num_kv_heads=3, head_dim=16)
LATENT = ContextCache(num_layers=3, num_kv_heads=1, head_dim=24, values="none", rotary_begin=16, interleaved=True)
OF_DRAFTERS = {
    "streams": InputStage("mtp", 2, 64, 48, 0.3, 0.0, "chunk", False, None, None, streams=4),
    "row": InputStage("mtp", 2, 64, 48, 0.3, 1.0, "chunk", False, None, None, streams=4, hnorm_over="row"),
    "dspark": InputStage("dspark", 5, 64, 48, 0.3, 0.0, "none", True, None, None, streams=4),
    "own_v": InputStage("context_kv", 1, 64, 192, 0.3, 0.0, "none", False, None, None, context=CONTEXT),
    "latent": InputStage("context_kv", 1, 64, 72, 0.3, 0.0, "none", False, None, None, context=LATENT),
}
# The rows of each stage, and the columns that are ours.
ROWS_OF_DRAFTERS = [
    ("norm_concat_linear", "streams", ("op", "layer")),
    ("norm_concat_linear", "row", ("layer",)),
    ("norm_concat_linear", "dspark", ("op",)),
    ("norm_concat_linear", "latent", ("op",)),
    ("capture_hidden", "dspark", ("op",)),
    ("store_context_kv", "own_v", ("op",)),
    ("store_context_kv", "latent", ("op",)),
]


def workload_of_drafter(
    op: str, stage: str, dtype: torch.dtype, weight: str = workloads.DENSE, copies: int = 2
) -> workloads.Workload:
    row = workloads.Row(op, "tiny", OF_DRAFTERS[stage], OF_DRAFTERS[stage].norm, 1000, 9, dtype, weight=weight)
    workload = workload_of(row)
    workload.allocate(copies)
    return workload


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("op", "stage", "ours"), ROWS_OF_DRAFTERS)
def test_rows_of_todays_drafters(op: str, stage: str, ours: tuple[str, ...], dtype: torch.dtype) -> None:
    """Every column agrees with float64, the eager ones too, whose errors bound ours."""
    workload = workload_of_drafter(op, stage, dtype)
    names = [name for name in ("op", "layer", *workload.baselines) if workload.unsupported_reason(name) is None]
    assert tuple(filter(measure.is_ours, names)) == ours
    assert {"eager", "compile"} <= set(names)
    names = [name for name in names if name not in ("compile", "inductor-max")]  # test_bench_with_compiled_baselines
    verdicts = workloads.judge(workload, [workload.variant(name) for name in names])
    assert all(verdict.is_right for verdict in verdicts.values()), verdicts
    assert str(workload.plan()).startswith(op)


def tensors_of(arguments: object) -> Iterator[torch.Tensor]:
    if isinstance(arguments, torch.Tensor):
        yield arguments
    elif isinstance(arguments, dict):
        yield from tensors_of(list(arguments.values()))
    elif isinstance(arguments, list | tuple):
        for argument in arguments:
            yield from tensors_of(argument)


@pytest.mark.parametrize(("op", "stage", "ours"), ROWS_OF_DRAFTERS)
def test_every_copy_has_its_own_memory(op: str, stage: str, ours: tuple[str, ...]) -> None:
    """Otherwise a call would read from a cache what an engine's call reads from memory. The footprint is what was
    allocated."""
    workload = workload_of_drafter(op, stage, torch.bfloat16, copies=4)
    traffic, storages = workload.traffic(), {}
    for calls in filter(None, (workload.chain_arguments, workload.op_arguments)):
        returns_it = op == "norm_concat_linear" and calls is workload.chain_arguments
        own = [{tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(call)} for call in calls]
        for number, call in enumerate(own):
            shared = set().union(*(other for at, other in enumerate(own) if at != number))
            rotated = sum(size for address, size in call.items() if address not in shared)
            assert rotated >= (traffic.read if returns_it else traffic.total)
        for tensor in tensors_of([*calls]):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    footprint = workload.footprint(["op", "eager"])
    assert footprint.touched == workload.traffic().total
    fixed = (1 << 12) + (footprint.fixed if op == "store_context_kv" else 0)  # gains, indices; frequencies
    assert 0.9 * 4 * footprint.touched <= sum(storages.values()) <= 4 * footprint.resident + fixed


def test_the_chain_of_streams_rounds_as_the_engines_do() -> None:
    """Both norms, both products and their sum (SGLang `deepseek_v4_nextn`, `qwen4_exp_mtp`)."""
    for stage, width in (("streams", 64), ("row", 4 * 64)):
        workload = workload_of_drafter("norm_concat_linear", stage, torch.bfloat16)
        embedding, streams, gains, (e_proj, h_proj), eps = workload.chain_arguments[0]
        e = torch.nn.functional.rms_norm(embedding, (64,), gains[0], eps) @ e_proj.t()
        h = torch.nn.functional.rms_norm(streams.view(-1, width), (width,), gains[1], eps).view(9, 4, 64) @ h_proj.t()
        assert torch.equal(workload.variant("eager").call(0).view(9, 4, 48), e[:, None] + h)
        assert torch.equal(torch.cat((e_proj, h_proj), 1), workload.weights[0])


def test_what_the_rows_of_a_cache_are() -> None:
    """Slots and positions in any order, K of one layer out of all, and V as it was."""
    own, latent = (workload_of_drafter("store_context_kv", stage, torch.bfloat16) for stage in ("own_v", "latent"))
    assert (own.exact, latent.exact) == ((False, True), (False,))
    for workload, columns in ((own, 96), (latent, 24)):
        record = workload.chain_arguments[0][0]
        assert record.kv.shape == (9, columns) and record.kv.stride(0) == workload.row.stage.D
        for index in (record.positions, record.slots):
            assert (index.diff() < 0).any()
        assert record.norm_width == workload.context.head_dim


def test_a_wrong_chain_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a baseline's bound, and ours, derive from the chain's error."""
    for op, stage in (("norm_concat_linear", "streams"), ("store_context_kv", "latent"), ("norm_concat", "dspark")):
        workload = workload_of_drafter(op, stage, torch.bfloat16)
        right = workload.chain
        workload.chain = lambda *arguments, right=right: tuple_of(right(*arguments))
        variants = [workload.variant("op" if op != "norm_concat_linear" else "layer"), workload.variant("eager")]
        verdicts = workloads.judge(workload, variants)
        assert not verdicts["eager"].is_right and verdicts[variants[0].name].is_right, (op, verdicts)


def tuple_of(result: object) -> tuple[torch.Tensor, ...]:
    """The outputs, twice as large."""
    return tuple(output.mul_(2) for output in (result if isinstance(result, tuple) else (result,)))


def wrong(workload: workloads.Workload, change: Callable[[list], None]) -> workloads.Verdict:
    """The verdict of the op after its arguments were changed, but not those of the truth."""
    variant = workload.variant("op")
    change(workload.op_arguments or workload.chain_arguments)
    return workloads.judge(workload, [variant])["op"]


def test_a_wrong_row_of_a_drafter_is_seen() -> None:
    """The embedding of another token, another stream's order, the position of another row, K of another layer."""

    def of_the_next_token(calls: list) -> None:
        for _, options in calls:
            options["indices"] = [(options["indices"][0] + 1) % 9, None]

    def without_a_stream(calls: list) -> None:
        calls[:] = [((read[0][:, :3],), options) for read, options in calls]

    assert not wrong(workload_of_drafter("norm_concat_linear", "streams", torch.bfloat16), of_the_next_token).is_right
    assert not wrong(workload_of_drafter("capture_hidden", "dspark", torch.bfloat16), without_a_stream).is_right
    for stage in ("own_v", "latent"):
        for field, other in (("positions", 1), ("slots", 3)):
            workload = workload_of_drafter("store_context_kv", stage, torch.float32)
            record = workload.chain_arguments[0][0]
            kept = getattr(record, field).clone()
            variant = workload.variant("op")
            truth = workload.truth(0, workload.checked_rows())
            getattr(record, field).copy_(kept.roll(other))
            variant.call(0)
            getattr(record, field).copy_(kept)
            errors = workloads._errors(workload, record.outputs, truth, workload.checked_rows())
            assert max(errors) > 0.1, (stage, field)


@pytest.mark.parametrize("format", ["fp8_block128", "nvfp4"])
def test_streams_of_a_quantized_weight(format: str) -> None:
    """DeepSeek-V4 ships its stage in FP8 blocks."""
    workload = workload_of_drafter("norm_concat_linear", "streams", torch.bfloat16, format)
    names = [name for name in ("op", "layer", "dense", "eager", "dequantize") if not workload.unsupported_reason(name)]
    assert names == ["op", "layer", "dense", "eager", "dequantize"]
    assert all(verdict.is_right for verdict in workloads.judge(workload, list(map(workload.variant, names))).values())
    row_wise = workload_of_drafter("norm_concat_linear", "row", torch.bfloat16, format)
    names = [name for name in ("op", "layer", "dense", "eager") if not row_wise.unsupported_reason(name)]
    assert names == ["layer", "eager"]
    assert all(verdict.is_right for verdict in workloads.judge(row_wise, list(map(row_wise.variant, names))).values())


@pytest.mark.parametrize("op", WORKLOADS)
def test_a_call_that_writes_nothing_is_seen(op: str) -> None:
    """Though the chain or another variant has left the right result in the same memory just before."""
    workload = workload_of_drafter(op, "dspark" if op == "capture_hidden" else "own_v", torch.bfloat16)
    variant = workload.variant("op")
    results = [variant.call(copy) for copy in range(2)]
    lazy = measure.Variant("lazy", results.__getitem__, 2)
    verdicts = workloads.judge(workload, [variant, lazy])
    assert verdicts["op"].is_right and not verdicts["lazy"].is_right


def test_bytes_and_products_of_streams() -> None:
    """As the engines compute it: one product for the embedding, and one for each of the 4 streams."""
    dense = workload_of_drafter("norm_concat_linear", "streams", torch.bfloat16)
    assert dense.flops() == 2 * 9 * (1 + 4) * 64 * 48
    assert dense.traffic() == measure.Traffic(2 * (48 * 128 + 9 * 5 * 64), 2 * 9 * 4 * 48)
    capture = workload_of_drafter("capture_hidden", "dspark", torch.bfloat16)
    assert capture.traffic() == measure.Traffic(2 * 9 * 4 * 64, 2 * 9 * 64)
    store = workload_of_drafter("store_context_kv", "own_v", torch.bfloat16)
    assert store.traffic() == measure.Traffic(2 * 9 * 96, 2 * 9 * 96)


def test_bench_of_todays_drafters(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op has rows for the stages that it is part of; their titles name what is special."""
    stages = tuple(OF_DRAFTERS[name] for name in ("streams", "dspark", "latent"))
    model = ModelShape("hyper", 64, 4, 1000, 0.3, 0.0, True, stages)
    monkeypatch.setattr(cli_types, "model_shapes", lambda: {"hyper": model})
    path, names = tmp_path / "run.json", [f"hyper:{stage.kind}" for stage in stages]
    arguments = [*BENCH, "--op", "all", "--preset", *names, "--tokens", "3", "--min-time", "0", "--json", str(path)]
    assert main([*arguments, "--markdown", str(tmp_path / "run.md")]) == 0
    printed, records = " ".join(capsys.readouterr().out.split()), load(path)["records"]
    assert all(record["status"] == "ok" for record in records)
    rows = {(record["op"], record["stage"]) for record in records}
    assert {stage for op, stage in rows if op == "norm_concat"} == {"dspark", "context_kv"}
    assert {stage for op, stage in rows if op == "store_context_kv"} == {"context_kv"}
    assert {stage for op, stage in rows if op == "norm_concat_linear"} == {stage.kind for stage in stages}
    assert {stage for op, stage in rows if op == "capture_hidden"} == {"dspark"}
    assert "norm_concat_linear, hyper:mtp, bf16: S=4 K=2 H=64 D=48" in printed
    assert "capture_hidden, hyper:dspark, bf16: S=4 K=5 H=64" in printed
    assert "store_context_kv, hyper:context_kv, bf16: n=1 d=24" in printed
    assert "| preset | n | d | T=3 |" in (tmp_path / "run.md").read_text()


def test_bench_without_a_row(tiny_machine: None, capsys: pytest.CaptureFixture) -> None:
    streams = ["--norm", "concat", "--preset", "deepseek-v4-flash:mtp"]
    for arguments, sentence in (
        (
            ["--op", "store_context_kv"],
            "no row of store_context_kv for tiny:eagle3: no cache of draft layers is part of it",
        ),
        (
            ["--op", "add_rms_norm", "--weights", "int8_row"],
            "no row of add_rms_norm for tiny:eagle3 x int8_row: it has no",
        ),
        (
            ["--op", "store_context_kv", "--preset", "qwen3-8b"],
            "for qwen3-8b:eagle3: no cache of draft layers is part of it; qwen3-8b:context_kv has one",
        ),
        (streams, "for deepseek-v4-flash:mtp: each of its sources has a norm, and --norm is concat"),
    ):
        with pytest.raises(SystemExit):
            main([*BENCH, "--preset", "tiny", *arguments])
        assert sentence in capsys.readouterr().err
    arguments = ["--op", "add_rms_norm,store_context_kv", "--preset", "tiny", "--tokens", "1", "--min-time", "0"]
    assert main([*BENCH, *arguments]) == 0
    assert "no row of store_context_kv for tiny:eagle3" in " ".join(capsys.readouterr().out.split())


def test_rows_of_streams_are_not_those_of_before(tmp_path: Path, tiny_machine: None) -> None:
    """A preset's stage may have gained streams: old records load with S=1, and share no row or table with S=4."""
    path = tmp_path / "run.json"
    monkeypatched = [*BENCH, "--preset", "tiny", "--tokens", "2", "--min-time", "0", "--json", str(path)]
    assert main(monkeypatched) == 0
    run = json.loads(path.read_text())
    for record in run["records"]:
        assert record.pop("S") == 1
    path.write_text(json.dumps(run))
    (old, *_) = load(path)["records"]
    assert old["S"] == 1 and saved_run.row_key(old) != saved_run.row_key(old | {"S": 4})
    assert "S=" not in saved_run.title(old) and " S=4 K=3" in saved_run.title(old | {"S": 4})


def test_bench_backends_are_columns(tiny_machine: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "3", "--forms", "op", "--backends", "auto,reference"]
    before = plan.SETTINGS
    assert main([*arguments, "--min-time", "0", "--json", str(path)]) == 0
    by_name = {record["variant"]: record for record in load(path)["records"]}
    assert set(by_name) == {"op", "op:reference", "eager"}
    assert "reference/plain torch" in by_name["op:reference"]["plan"]
    assert by_name["op"]["plan"] != by_name["op:reference"]["plan"] or library.unsupported_reason
    assert by_name["op"]["is_ours"] and by_name["op:reference"]["is_ours"] and "speedup" in by_name["eager"]
    assert before == plan.SETTINGS


@pytest.mark.parametrize("op, expected", [("norm_concat_linear", ["slices", "linear"]), ("norm_concat", ["slices"])])
def test_bench_baselines_of_norms_and_product(
    op: str, expected: list[str], tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--op", op, "--preset", "tiny", "--tokens", "3", "--baselines", "slices,linear,liger"]
    assert main([*arguments, "--forms", "op", "--min-time", "0", "--json", str(path)]) == 0
    records = load(path)["records"]
    assert [record["variant"] for record in records] == ["op", *expected]
    assert all(record["status"] == "ok" for record in records)
    assert re.search(
        "no column liger: (liger_kernel is not installed|the kernels of liger_kernel take CUDA)",
        " ".join(capsys.readouterr().out.split()),
    )


@pytest.mark.skipif(library.unsupported_reason is not None, reason=str(library.unsupported_reason))
def test_bench_of_the_two_steps_at_rows_of_one_pass(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side with the op, for the threshold between them; not for codes, nor before a post norm on a CPU."""
    primitive, calls = library.primitives.norm_concat_linear_two_step_out, []

    def counted(*arguments: object) -> None:
        calls.append(arguments)
        primitive(*arguments)

    monkeypatch.setattr(library.primitives, "norm_concat_linear_two_step_out", counted, raising=False)
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "3", "--forms", "op", "--baselines", "two-step"]
    assert main([*arguments, "--min-time", "0", "--json", str(path)]) == 0
    op, two_steps = load(path)["records"]
    assert (op["variant"], two_steps["variant"], two_steps["status"]) == ("op", "two-step", "ok")
    assert "cpu/fused" in op["plan"] and two_steps["speedup"] > 0 and calls
    main([*arguments, "--min-time", "0", "--weights", "int8_row"])
    assert "no column two-step: the weight is codes" in capsys.readouterr().out
    stage = InputStage("dflash", 3, 96, 48, 1e-5, 0.0, "chunk", True, None, None)
    workload = WORKLOADS["norm_concat_linear"](
        workloads.Row("norm_concat_linear", "tiny", stage, "chunk", 9, 3, torch.bfloat16)
    )
    assert workload.unsupported_reason("two-step").startswith("torch's product rounds")


def test_bench_of_a_baseline_alone(tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "3", "--forms", "none", "--baselines", "linear"]
    assert main([*arguments, "--min-time", "0", "--json", str(path), "--markdown", str(tmp_path / "run.md")]) == 0
    assert [record["variant"] for record in load(path)["records"]] == ["linear"]
    assert "| T | linear ms | GB/s |" in (tmp_path / "run.md").read_text()


MEMORY_OPS = ("norm_concat", "capture_hidden", "add_rms_norm", "vocab_parallel_embedding")


def allocated_bytes(call: Callable[[], object]) -> int:
    """What one call allocates, freed or not, by torch's own count."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    return sum(event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "op, norm",
    [*(("norm_concat", norm) for norm in ("chunk", "concat", "none")), *((op, "none") for op in MEMORY_OPS[1:])],
)
def test_eager_out_is_eager_without_an_allocation(op: str, norm: str, dtype: torch.dtype) -> None:
    stage = InputStage("eagle3", 3, 96, 48, 1e-5, 0.0, norm, False, None, None)
    workload = WORKLOADS[op](workloads.Row(op, "tiny", stage, norm, 1000, 64, dtype))
    workload.allocate(2)
    eager, preallocated = (workload.variant(name) for name in ("eager", "eager-out"))
    verdicts = workloads.judge(workload, [eager, preallocated])
    assert all(verdict.is_right for verdict in verdicts.values()), verdicts
    assert allocated_bytes(lambda: preallocated.call(1)) <= 256  # a number on its way to a tensor takes 8
    if (op, norm) != ("norm_concat", "none"):
        assert allocated_bytes(lambda: eager.call(1)) >= 64 * 96 * workload.item


def test_eager_of_a_memory_op_is_never_alone(tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, arguments = tmp_path / "run.json", [*BENCH, "--op", "all", "--preset", "tiny", "--tokens", "2,3"]
    assert main([*arguments, "--forms", "op", "--min-time", "0", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    columns: dict[str, list[str]] = {}
    for record in load(path)["records"]:
        columns.setdefault(record["op"], []).append(record["variant"])
    assert columns.pop("norm_concat_linear") == ["op", "eager"] * 2
    assert columns == {op: ["op", "eager", "eager-out"] * 2 for op in MEMORY_OPS}
    assert "no column eager-out" not in printed
    means = re.findall(r"geomean op: .*(?:\n  .*)*", printed)
    assert [" eager (" in text for text in means] == [True, *[False] * len(MEMORY_OPS), True]  # the last: of all ops
    assert re.search(r"2 rows\), .*8 rows\)$", " ".join(means[-1].split()))


SLOW = measure.Rates(copy=2e3, read=1e3, matmul=1e15)  # bytes per second: no row is that slow
FAST = measure.Rates(copy=2e15, read=1e15, matmul=1e15)


@pytest.mark.skipif(library.unsupported_reason is not None, reason="torch's own kernels are no ceiling to fail by")
def test_a_row_above_its_ceiling_fails_the_run(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "4", "--min-time", "0", "--forms", "op", "--json", str(path)]
    monkeypatch.setattr(saved_run, "_CEILING_LIMIT", 1.03)
    for planted, status in ((FAST, 0), (SLOW, 1)):
        capsys.readouterr()
        monkeypatch.setattr(measure.Ceilings, "rates", lambda self, dtype, samples, planted=planted: planted)
        assert main(arguments) == status
    wrapped = re.findall(r"^ABOVE THE CEILING.*(?:\n  .*)*", capsys.readouterr().out, re.MULTILINE)
    sentences = [" ".join(sentence.split()) for sentence in wrapped]
    (op, eager) = load(path)["records"]
    assert len(sentences) == 2
    assert re.fullmatch(
        rf"ABOVE THE CEILING: norm_concat_linear tiny:eagle3 T=4 bf16 op moved {op['gbps']:.1f} GB/s, \d+ % of the 0.0 "
        r"GB/s that streaming reached beside it \(read 0.0, copy 0.0\), expected at most 103 %",
        sentences[0],
    )
    assert "T=4 bf16 eager moved" in sentences[1] and eager["memory_gbps"] == pytest.approx(1e-6, rel=0.05)


@pytest.mark.skipif(library.unsupported_reason is not None, reason="torch's own kernels are no ceiling to fail by")
def test_a_ceiling_that_was_wrong_for_a_moment_is_measured_again(
    tiny_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, planted = tmp_path / "run.json", iter([SLOW, FAST])
    monkeypatch.setattr(saved_run, "_CEILING_LIMIT", 1.03)
    monkeypatch.setattr(measure.Ceilings, "rates", lambda self, dtype, samples: next(planted))
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "4", "--min-time", "0", "--forms", "op", "--json", str(path)]
    assert main(arguments) == 0
    assert [record["variant"] for record in load(path)["records"]] == ["op", "eager"]
    assert next(planted, None) is None


@pytest.mark.parametrize(
    "changes, is_above",
    [
        ({}, True),
        ({"gbps": 30.8}, False),  # 102.7 %
        ({"cold": False}, False),  # from the cache
        ({"array_exceeds_cache": False}, False),
        ({"ceiling": "torch"}, False),
        ({"status": "skipped"}, False),
    ],
)
def test_what_is_above_a_ceiling(changes: dict, is_above: bool) -> None:
    record = {"status": "ok", "ceiling": "streams", "cold": True, "array_exceeds_cache": True}
    assert saved_run.is_above_ceiling(record | {"gbps": 31.0, "memory_gbps": 30.0} | changes) == is_above


def test_bench_of_an_explicit_shape(tiny_machine: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    shape = ["--chunks", "2", "--hidden", "32", "--out", "16"]
    assert main([*BENCH, *shape, "--tokens", "1:4:x2", "--forms", "op", "--min-time", "0", "--json", str(path)]) == 0
    rows = {(r["preset"], r["norm"], r["K"], r["H"], r["D"], r["T"]) for r in load(path)["records"]}
    assert rows == {("explicit", "chunk", 2, 32, 16, T) for T in (1, 2, 4)}


def test_bench_writes_csv_markdown_and_a_plot(tiny_machine: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    suffixes = {"json": "json", "csv": "csv", "markdown": "md", "plot": "png"}
    paths = {name: tmp_path / f"run.{suffix}" for name, suffix in suffixes.items()}
    outputs = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    assert main([*BENCH, "--preset", "tiny", "--tokens", "1,8", "--min-time", "0", *outputs]) == 0
    records = load(paths["json"])["records"]
    with paths["csv"].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["median_ms"]) for line in lines] == [record["median_ms"] for record in records]
    assert {line["torch"] for line in lines} == {torch.__version__}
    assert paths["markdown"].read_text().count("\n| ") == 4  # titles, alignment, two rows
    assert paths["plot"].read_bytes().startswith(b"\x89PNG")


def test_bench_resumes(tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--min-time", "0", "--json", str(path), "--resume", "--tokens"]
    assert main([*arguments, "1,2"]) == 0
    first = load(path)["records"]
    assert main([*arguments, "1,2,3"]) == 0
    run = load(path)
    assert run["records"][: len(first)] == first
    assert [record["T"] for record in run["records"][len(first) :]] == [3, 3, 3]
    assert run["environment"]["resumed"][0]["argv"] == [*arguments, "1,2"]
    assert "2 rows kept from" in capsys.readouterr().out


@pytest.mark.parametrize("field, before", [("device_slug", "another"), ("threads", 7), ("commit", "0"), ("torch", "1")])
def test_bench_resumes_in_the_same_environment_only(
    field: str, before: object, tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--min-time", "0", "--json", str(path), "--resume", "--tokens"]
    assert main([*arguments, "1"]) == 0
    run = load(path)
    now = run["environment"][field]
    saved_run.save(path, run["environment"] | {field: before}, run["argv"], run["records"])
    saved = path.read_bytes()
    with pytest.raises(SystemExit):
        main([*arguments, "1,2"])
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.endswith(f"argument --resume: {path} was measured with {field} {before} and not {now}")
    assert path.read_bytes() == saved


def test_bench_resume_measures_a_new_baseline_and_what_failed(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "run.json"
    arguments = [*BENCH, "--preset", "tiny", "--min-time", "0", "--forms", "op", "--json", str(path), "--resume"]
    assert main([*arguments, "--tokens", "1,2,3"]) == 0
    run = load(path)
    failed = {"status": "failed", "reason": "out of disk"}
    records = [record | failed if record["T"] == 2 and record["is_ours"] else record for record in run["records"]]
    saved_run.save(path, run["environment"], run["argv"], records)
    capsys.readouterr()
    assert main([*arguments, "--tokens", "1,2,3"]) == 0
    assert "2 rows kept from" in capsys.readouterr().out
    again = load(path)["records"]
    assert [(record["T"], record["variant"]) for record in again] == [
        (T, name) for T in (1, 2, 3) for name in ("op", "eager")
    ]
    assert all(record["status"] == "ok" for record in again)
    assert [record for record in again if record["T"] != 2] == [record for record in records if record["T"] != 2]
    assert main([*arguments, "--tokens", "1", "--baselines", "slices"]) == 0
    wider = load(path)["records"]
    assert [record["variant"] for record in wider if record["T"] == 1] == ["op", "slices", "eager"]
    assert len({record["copies"] for record in wider if record["T"] == 1}) == 1
    assert [record for record in wider if record["T"] != 1] == [record for record in again if record["T"] != 1]


@pytest.mark.parametrize("norm, stage", [("concat", "eagle3"), ("none", "eagle3"), ("chunk", "mtp")])
def test_bench_norms_and_stages(norm: str, stage: str, tiny_machine: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = [] if stage == "mtp" else ["--norm", norm]
    arguments = [
        *BENCH,
        "--op",
        "norm_concat_linear,norm_concat",
        "--preset",
        f"tiny:{stage}",
        "--tokens",
        "3",
    ]
    assert main([*arguments, "--min-time", "0", "--json", str(path), *options]) == 0
    assert {(record["norm"], record["stage"]) for record in load(path)["records"]} == {(norm, stage)}


BASELINES_OF_CODES = "eager,dequantize,int8pack,torchao"
# A stand-in for torchao, which neither the tests nor the package require.
TORCHAO = """
class Int8WeightOnlyConfig: pass
def quantize_(layer, config):
    assert type(config) is Int8WeightOnlyConfig
    layer.weight.data = layer.weight.data.clone()
"""


@pytest.fixture
def torchao(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torchao as installed, or the stand-in, which is removed again before transformers asks for its version."""
    is_installed = importlib.util.find_spec("torchao") is not None
    if not is_installed:
        (tmp_path / "torchao").mkdir()
        (tmp_path / "torchao" / "__init__.py").touch()
        (tmp_path / "torchao" / "quantization.py").write_text(TORCHAO)
        monkeypatch.syspath_prepend(tmp_path)
    yield
    if not is_installed:
        for name in ("torchao", "torchao.quantization"):
            sys.modules.pop(name, None)


def test_bench_of_quantized_weights(
    torchao: None, tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each format is a table of its own: ours on codes, ours and eager on the dequantized weight, others' products."""
    path = tmp_path / "run.json"
    columns = ["--forms", "op,layer,dense", "--baselines", BASELINES_OF_CODES, "--weights", "dense,int8_row,nvfp4"]
    assert main([*BENCH, "--preset", "tiny", "--tokens", "3", *columns, "--min-time", "0", "--json", str(path)]) == 0
    records = load(path)["records"]
    assert [(record["weight"], record["variant"]) for record in records] == [
        *(("dense", name) for name in ("op", "layer", "eager")),
        *(("int8_row", name) for name in ("op", "dense", "eager", "dequantize", "int8pack", "torchao")),
        *(("nvfp4", name) for name in ("op", "dense", "eager", "dequantize")),
    ]
    assert all(record["status"] == "ok" for record in records)
    read = {record["weight"]: record["bytes"] for record in records}
    assert read["dense"] > 1.5 * read["int8_row"] > 2 * read["nvfp4"]
    assert "bf16 x int8_row" in capsys.readouterr().out


@pytest.mark.slow
def test_bench_with_compiled_baselines(tiny_machine: None, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = [
        *BENCH,
        "--preset",
        "tiny",
        "--tokens",
        "4",
        "--baselines",
        ",".join(BASELINES),
        "--min-time",
        "0",
    ]
    own = [name for name in BASELINES if name not in ("eager-out", *QUANTIZED, *FOREIGN)]
    assert main([*arguments, "--json", str(path)]) == 0
    by_name = {record["variant"]: record for record in load(path)["records"]}
    assert set(by_name) == {"op", "layer", *own}
    assert all(record["status"] == "ok" for record in by_name.values())
    assert len({record["copies"] for record in by_name.values()}) == 1


def test_bench_gate_keeps_times_of_wrong_results_back(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ek, "norm_concat_linear", scaled(ek.norm_concat_linear))
    path = tmp_path / "run.json"
    assert main([*BENCH, "--preset", "tiny", "--tokens", "4", "--min-time", "0", "--json", str(path)]) == 1
    assert "WRONG RESULT, no times: op error" in capsys.readouterr().out
    assert all(record["status"] == "wrong" and "median_ms" not in record for record in load(path)["records"])


def test_bench_leaves_out_a_baseline_with_a_wrong_result(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "compiled", lambda chain, arguments: lambda copy: 2 * chain(*arguments[copy]))
    path = tmp_path / "run.json"
    command = [*BENCH, "--preset", "tiny", "--tokens", "4", "--baselines", "eager,compile", "--min-time", "0"]
    assert main([*command, "--json", str(path)]) == 0
    assert "compile failed: wrong result: error 1.00e+00, bound" in " ".join(capsys.readouterr().out.split())
    by_name = {record["variant"]: record for record in load(path)["records"]}
    assert {name: record["status"] for name, record in by_name.items()} == {
        "op": "ok",
        "layer": "ok",
        "eager": "ok",
        "compile": "failed",
    }
    assert "median_ms" not in by_name["compile"]


@pytest.mark.slow
def test_frozen_projections_have_weights_of_their_own() -> None:
    # Weights of one storage, whose packed forms Inductor confuses where nothing is done about it.
    weights = (torch.randn(2, 64, 96) / 96**0.5).bfloat16().unbind()
    chunks, gains = torch.randn(3, 8, 32).bfloat16().unbind(), torch.rand(3, 32).bfloat16().unbind()
    arguments = [(chunks, gains, weight, "chunk", 1e-6, None) for weight in weights]
    with torch.no_grad():
        modules = baselines.frozen_projections(arguments)
        for module, (_, _, weight, *settings) in zip(modules, arguments, strict=True):
            truth = baselines.projection(
                [chunk.double() for chunk in chunks], [gain.double() for gain in gains], weight.double(), *settings
            )
            assert relative_rms(module(chunks), truth) < 2**-7


def test_bench_skips_what_does_not_fit(
    tiny_machine: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "available_bytes", lambda device: MB // 64)
    assert main([*BENCH, "--preset", "tiny", "--tokens", "512", "--min-time", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"512 .*skipped: needs [\d.]+ kB, 11.5 kB of memory may be used", said)


def test_interrupted_bench_keeps_finished_rows(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = benchmark.Runner.measure

    def interrupt_second(self: object, workload: object, names: list[str]) -> list[dict]:
        if workload.row.T == 2:
            raise KeyboardInterrupt
        return measure(self, workload, names)

    monkeypatch.setattr(benchmark.Runner, "measure", interrupt_second)
    path = tmp_path / "run.json"
    assert main([*BENCH, "--preset", "tiny", "--tokens", "1,2", "--min-time", "0", "--json", str(path)]) == 130
    assert {record["T"] for record in load(path)["records"]} == {1}
    assert "interrupted: what is above is complete" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    """A real SIGINT to a real process, as in a shell's background, where SIGINT starts out ignored."""
    path = tmp_path / "run.json"
    shape = ["--chunks", "2", "--hidden", "64", "--out", "64", "--tokens", "1:32768:x2", "--min-time", "0.2"]
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from eagle_kernels.bench import cli, info, measure\n"
        "from eagle_kernels.bench.runs import saved_run; saved_run._CEILING_LIMIT = 1e9\n"
        "info.available_bytes = lambda device: 1 << 26\n"
        "info.cache_bytes = lambda device: 1 << 16; measure._SECONDS = {'cpu': 0.0}\n"
        "measure._MATMUL = {'cpu': ((16, 64, 64),)}; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *BENCH, *shape, "--json", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert path.exists(), process.communicate(timeout=5)[0]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "interrupted: what is above is complete" in printed and "repro: eagle-kernels bench" in printed
    measured = {record["T"] for record in load(path)["records"]}
    assert {1} <= measured < {1 << power for power in range(16)}


def test_list_names_everything_and_what_is_missing(capsys: pytest.CaptureFixture) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in (*ops.__all__, *model_shapes(), *environment.BACKENDS, *BASELINES, *info.DEVICES):
        assert name in printed
    said = " ".join(printed.split())
    assert re.search("flashinfer .*not here: flashinfer is not installed|flashinfer .*take CUDA", said)


def test_roofline(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rates.json"
    rates = measure.Rates(copy=20e9, read=25e9, matmul=1e12)
    monkeypatch.setattr(measure.Ceilings, "measure", lambda self, dtype, seconds: rates)
    arguments = ["roofline", "--device", "cpu", "--preset", "llama3.1-8b", "--tokens", "1,4096", "--min-time", "0"]
    assert main([*arguments, "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "bf16: copy 20.0 GB/s, read 25.0 GB/s, matmul 1.00 TFLOP/s" in printed
    # 2 * (D*K*H + T*(K*H + D)) bytes at 25 GB/s and 2*T*K*H*D operations at 1 TFLOP/s
    assert re.search(r"K=3 H=4096 D=4096\n +1 +100\.7 +0\.10 +4028\.0  memory", printed)
    assert re.search(r" 4096 +234\.9 +412\.32 +412316\.9  matmul", printed)
    saved = {"copy": 20e9, "read": 25e9, "matmul": 1e12, "add": None, "fastest": None, "fastest_stream": None}
    assert json.loads(path.read_text())["rates"]["bf16"] == saved
    rates = measure.Rates(copy=20e9, read=25e9, matmul=1e12, fastest=30e9, fastest_stream="read by Triton")
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "memory: the fastest stream, read by Triton: 30.0 GB/s" in printed
    assert re.search(r"K=3 H=4096 D=4096\n +1 +100\.7 +0\.10 +3356\.5  memory", printed)


@pytest.mark.parametrize("command", [["bench"], ["roofline"], ["tune"]], ids=lambda command: command[0])
def test_no_gpu_is_said(command: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert "no CUDA device: " in sentence
    assert ("--dry-run" if command == ["tune"] else "--device cpu") in sentence


@pytest.mark.parametrize(
    "text, counts",
    [
        ("1,2,4", [1, 2, 4]),
        ("1:8192:x2", [1 << power for power in range(14)]),
        ("3:100:x3", [3, 9, 27, 81]),
        ("1:4:x2,4,7", [1, 2, 4, 7]),
        ("5:5:x2", [5]),
    ],
)
def test_row_counts(text: str, counts: list[int]) -> None:
    assert cli_types.row_counts(text) == counts


def test_distinct_presets_are_one_of_each_shape() -> None:
    every, distinct = cli_types.presets("all"), cli_types.presets("distinct")
    assert len(every) == sum(len(model.stages) for model in model_shapes().values())
    shapes = [(stage.K, stage.H, stage.D, stage.post_norm, stage.norm_offset) for _, stage, _ in distinct]
    assert {(stage.K, stage.H, stage.D) for _, stage, _ in every} == {shape[:3] for shape in shapes}
    of_mtp = {(stage.H, stage.D, stage.norm_offset, stage.streams) for _, stage, _ in distinct if stage.kind == "mtp"}
    assert {(4096, 4096, 0.0, 1), (4096, 4096, 0.0, 4)} <= of_mtp
    assert len({stage.context for _, stage, _ in distinct}) == 1 + 2
    assert len(distinct) < len(every)


def test_presets_have_commas_between() -> None:
    names = [(name, stage.kind) for name, stage, _ in cli_types.presets("qwen3-8b,qwen3-8b:dflash,glm-4.5-air")]
    assert names == [("qwen3-8b", "eagle3"), ("qwen3-8b", "dflash"), ("glm-4.5-air", "mtp")]


def test_failing_baseline_is_a_note(
    tiny_machine: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr("eagle_kernels.bench.workloads.compiled", fail)
    arguments = [
        *BENCH,
        "--preset",
        "tiny",
        "--tokens",
        "4",
        "--baselines",
        "eager,compile",
        "--min-time",
        "0",
    ]
    assert main(arguments) == 0
    assert "compile failed: RuntimeError: no compiler found\n" in capsys.readouterr().out


def test_report_prints_markdown(tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.json"
    main([*BENCH, "--preset", "tiny", "--tokens", "1", "--min-time", "0", "--json", str(path)])
    capsys.readouterr()
    assert main(["report", str(path)]) == 0
    text = capsys.readouterr().out
    assert "| T | op ms | layer ms | eager ms | vs eager | GB/s | % memory | TFLOP/s | % matmul |" in text
    assert main(["report", str(path), "--plots"]) == 0
    assert f"({path.with_suffix('.png').as_posix()})" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message, known",
    [
        ([*BENCH, "--preset", "gpt-5"], "preset 'gpt-5' is unknown, known are: ", model_shapes()),
        ([*BENCH, "--preset", "qwen3-8b:mtp"], "qwen3-8b has no stage 'mtp', it has: ", ["eagle3"]),
        (
            [*BENCH, "--op", "softmax"],
            "op 'softmax' is unknown, known are: ",
            [*ops.__all__, "all"],
        ),
        (
            [*BENCH, "--baselines", "eager,cudnn"],
            "baseline 'cudnn' is unknown, known are: ",
            BASELINES,
        ),
        (
            [*BENCH, "--dtype", "int8"],
            "dtype 'int8' is unknown, known are: ",
            ["bf16", "fp16", "fp32"],
        ),
        (
            [*BENCH, "--forms", "kernel"],
            "form 'kernel' is unknown, known are: ",
            ["op", "layer", "prepacked"],
        ),
        (["bench", "--device", "tpu"], "device 'tpu' is unknown, known are: ", ["cuda", "cpu"]),
        ([*BENCH, "--tokens", "1,0"], "row counts are '1,0', expected numbers of at least 1", []),
        ([*BENCH, "--tokens", "1,x"], "row counts are '1,x', expected numbers of at least 1", []),
        ([*BENCH, "--tokens", "1:8:2"], "or FIRST:LAST:xFACTOR such as 1:8192:x2", []),
        ([*BENCH, "--tokens", "8:1:x2"], "row counts are '8:1:x2'", []),
        ([*BENCH, "--tokens", "1:8:x1"], "row counts are '1:8:x1'", []),
        ([*BENCH, "--backends", "auto,mps"], "backend 'mps' is unknown, known are: ", environment.BACKENDS),
        ([*BENCH, "--backends", "cuda"], "cuda cannot run here: ", ["usable are: auto"]),
        ([*BENCH, "--timer", "graph"], "graph is not for cpu, which has: clock", []),
        (
            [*BENCH, "--hidden", "64"],
            "an explicit shape is --chunks K --hidden H --out D; --chunks, --out is missing",
            [],
        ),
        ([*BENCH, "--vocab", "64"], "--vocab belongs to an explicit shape", []),
        ([*BENCH, "--resume"], "argument --resume: there is nothing to go on with, --json names no file", []),
        ([*BENCH, "--plot", "run.svg"], "'run.svg' is not a name that ends in .png", []),
        ([*BENCH, "--plot", "/proc/none/x.png"], "argument --plot: ", []),
        ([*BENCH, "--json", "/dev/full"], "argument --json: /dev/full is no regular file", []),
        ([*BENCH, "--json", "one.x", "--csv", "one.x"], "argument --csv: one.x is the file of --json too", []),
        ([*BENCH, "--op", ""], "argument --op: '' names no op, known are: ", ops.__all__),
        ([*BENCH, "--dtype", ""], "argument --dtype: '' names no dtype, known are: bf16, fp16, fp32", []),
        ([*BENCH, "--forms", ","], "argument --forms: ',' names no form, known are: ", measure.FORMS),
        (["roofline", "--device", "cpu", "--json", "/proc/none/x.json"], "argument --json: /proc/none/x.json: ", []),
        (["host", "--json", "/proc/none/x.json"], "argument --json: /proc/none/x.json: ", []),
        (["plot", "a.json", "--out", "/proc/none/x.png"], "argument --out: /proc/none/x.png: ", []),
        (["completion", "fish"], "invalid choice: 'fish'", ["bash", "zsh", "tcsh"]),
        (["plot", "/proc/none.json"], "/proc/none.json: No such file", []),
        (["plot", "."], "plot: error: .: Is a directory", []),
        (["plot", "/"], "plot: error: /: Is a directory", []),
        (["plot", "a.json", "--out", f"{'x' * 300}.png"], ".png: File name too long", []),
        ([*BENCH, "--json", "x" * 250], f"argument --json: {'x' * 250}: File name too long", []),  # x.partial's
        (["compare", "/proc/a.json", "/proc/b.json"], "/proc/a.json: No such file", []),
        (["compare", "a", "b", "--tolerance", "few%"], "'few' is not a number of at least 0", []),
        (["compare", "a", "b", "--tolerance", "5"], "'5' is a fraction of 1 or more, write 5%", []),
        ([*BENCH, "--threads", "0"], "'0' is not a number of at least 1", []),
        ([*BENCH, "--min-time", "fast"], "'fast' is not a number of at least 0", []),
        ([*BENCH, "--min-time", "inf"], "'inf' is not a number of at least 0", []),
        ([*BENCH, "--json", "/proc/none/x.json"], "argument --json: /proc/none/x.json: ", []),
        (["check", "--op", "softmax"], "op 'softmax' is unknown, known are: ", ops.__all__),
        (["check", "--backend", "mps"], "backend 'mps' is unknown, known are: ", environment.BACKENDS),
        (["check", "--isa", "sse"], "instruction set 'sse' is unknown, known are: ", environment.CPU_ISAS),
        (["check", "--backend", "cuda"], "nothing to check: no usable backend", []),
        (["check", "--backend", "cuda", "--cases", str(10**30)], "nothing to check: no usable backend", []),
        (["report", "/proc/none.json"], "/proc/none.json: No such file", []),
        (["draw"], "invalid choice: 'draw'", []),
        ([], "required", []),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) and value[:1] and value[0] in "bench check" else "",
)
def test_bad_input_is_one_clear_sentence(
    arguments: list[str], message: str, known: object, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert message in sentence
    for name in known:
        assert name in sentence


def run_cli(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "eagle_kernels.bench.cli", *arguments]
    # With unbuffered output argparse swallows what it cannot print.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=variables, **options)


def widest(printed: str) -> str:
    """The longest line, except those that are there to be copied: a command, or a path on a line of its own."""
    lines = [line for line in printed.splitlines() if " " in line.strip() and not line.lstrip().startswith("repro: ")]
    return max(lines, key=len)


@pytest.mark.parametrize(
    "command",
    [
        ["info"],
        ["list"],
        ["check", "--cases", "1", "--backend", "reference"],
        ["host", "--rounds", "1", "--burst", "1"],
        ["demo", "--tokens", "4"],
        ["tune", "--dry-run", "--preset", "gemma3-1b", "--tokens", "8,4096"],
        ["roofline", "--device", "cpu", "--preset", "all", "--tokens", "1,131072", "--min-time", "0"],
        [*BENCH, "--op", "all", "--preset", "tiny", "--baselines", "eager,slices,linear,liger", "--min-time", "0"],
    ],
    ids=lambda command: command[0],
)
def test_what_is_printed_fits_80_columns(
    command: list[str], tiny_machine: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command[0] == "bench":
        monkeypatch.setattr(saved_run, "_CEILING_LIMIT", 0.0)  # every row has a sentence below it
        command = [*command, "--forms", "op,layer,prepacked", "--backends", "auto,reference", "--tokens", "1,512"]
    if command[0] == "demo":
        pytest.importorskip("transformers")
    main(command)
    line = widest(capsys.readouterr().out)
    assert len(line) <= 80, line


@pytest.mark.parametrize("command", ["", *cli._COMMANDS])
def test_help_fits_80_columns(command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"] if command else ["--help"])
    assert len(widest(capsys.readouterr().out)) <= 80


@pytest.mark.parametrize("timers", [["clock"], ["graph", "eager"]], ids=["cpu", "cuda"])
def test_the_widest_row_fits_80_columns(timers: list[str]) -> None:
    backends = environment.BACKENDS if timers == ["clock"] else ("cuda", "triton", "cpu")
    forms = measure.FORMS if timers == ["clock"] else ("op", "layer")
    names = [f"{form}:{backend}" for form in forms for backend in backends]
    sizes = {
        "op": "norm_concat_linear",
        "preset": "x",
        "stage": "eagle3",
        "norm": "chunk",
        "S": 1,
        "K": 3,
        "H": 1,
        "D": 1,
        "V": 1,
    }
    unit = 1.0 if timers == ["clock"] else 1e-3
    times = dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), 0.00123 if timers == ["clock"] else 54321 * unit)
    figures = {"gbps": 4321.0, "memory_gbps": 4321.0, "tflops": 999.0, "matmul_tflops": 999.0, "cold": True}
    ratio = {"speedup": 12.34, "speedup_low": 0.5, "speedup_high": 20.0}
    row = [
        {**sizes, "T": 131072, "dtype": "bf16", "timer": timers[-1], "variant": name, "is_ours": True, "status": "ok"}
        | {**times, **figures, **ratio}
        for name in names
    ]
    layout = report.Layout(names, "norm_concat_linear", timers)
    lines = [layout.header(), *layout.lines(row)]
    assert len(lines) == 1 + len(names)
    assert max(map(len, lines)) <= 80, max(lines, key=len)


def test_info_as_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "build", "devices", "environment", "plans"}
    assert facts["versions"]["torch"] == torch.__version__
    assert {variable["name"] for variable in facts["environment"]} >= {"EAGLE_KERNELS_BACKEND", "EAGLE_KERNELS_CPU_ISA"}
    plans = facts["plans"]["cpu"]
    assert {planned["op"] for planned in plans} == set(ops.__all__)
    assert all(planned["runs"] and planned["reason"] for planned in plans)


def test_info_without_docstrings() -> None:
    """The variables were an empty list."""
    command = [sys.executable, "-OO", "-m", "eagle_kernels.bench.cli", "info", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["environment"] == list(info._environment())


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for word in ("roofline", "baselines", "tolerance"):
        assert word in script
    if shell == "bash":
        parsed = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert parsed.returncode == 0, parsed.stderr
        assert re.search(r"bench__+json_COMPGEN=_shtab_compgen_files", script)


def test_without_shtab_completion_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "bash"])
    assert stopped.value.code == 2
    assert "shtab is not installed: pip install 'eagle-kernels[cli]'" in capsys.readouterr().err


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "log"])
def test_progress_has_the_time_left_on_a_terminal_only(
    is_terminal: bool, tiny_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tqdm")
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    assert main([*BENCH, "--preset", "tiny", "--tokens", "1,2", "--min-time", "0"]) == 0
    shown = screen.getvalue()
    if is_terminal:
        assert re.search(r"1/2 rows \|.{10}\| \d\d:\d\d, \d\d:\d\d left: norm_concat_linear tiny:eagle3 T=2 ", shown), (
            shown
        )
    else:
        assert shown == ""


def test_without_tqdm_there_is_no_progress(tiny_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    assert main([*BENCH, "--preset", "tiny", "--tokens", "1", "--min-time", "0"]) == 0
    assert screen.getvalue() == ""


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["info", "--json"]], ids=" ".join)
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        run = run_cli(*arguments, stdout=full)
    assert (run.returncode, run.stderr) == (
        1,
        "eagle-kernels: standard output was not written: No space left on device\n",
    )


def test_a_closed_output_is_one_sentence() -> None:
    run = subprocess.run(
        ["sh", "-c", '"$0" -m eagle_kernels.bench.cli list >&-', sys.executable], stderr=subprocess.PIPE, text=True
    )
    assert (run.returncode, run.stderr) == (1, "eagle-kernels: standard output was not written: it is closed\n")


def test_markdown_of_a_result_whose_name_is_no_text(tiny_machine: None, tmp_path: Path) -> None:
    """A UnicodeEncodeError once all was measured."""
    result, page = tmp_path / "\udcff.json", tmp_path / "run.md"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "1", "--min-time", "0"]
    assert main([*arguments, "--json", str(result), "--markdown", str(page)]) == 0
    assert "\\udcff.json" in page.read_text()


def test_a_result_that_cannot_be_saved_is_one_sentence(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run.json"
    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([*BENCH, "--preset", "tiny", "--tokens", "1", "--min-time", "0", "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.err == f"eagle-kernels: {path} was not written: No space left on device\n"
    assert "saved" not in printed.out and not list(tmp_path.iterdir())


def test_ctrl_c_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.write_text(tmp_path / "run.json", "{}")
    assert not list(tmp_path.iterdir())


def test_an_unknown_backend_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_KERNELS_BACKEND", "tpu")
    run = run_cli("info", stdout=subprocess.DEVNULL)
    assert run.returncode == 2
    assert "EAGLE_KERNELS_BACKEND is 'tpu', expected one of ('auto', 'cuda'" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr


def test_modules_that_take_long_to_make_bound_the_copies(
    tiny_machine: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 64-wide weight was copied until 37500 layers exceeded a 480 MiB cache: 118 s without a row."""
    monkeypatch.setattr("eagle_kernels.bench.ops.norm_concat_linear.MAX_LAYERS", 2)
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "1", "--min-time", "0"]
    assert main([*arguments, "--forms", "op"]) == 0
    assert "not cold" not in capsys.readouterr().out
    assert main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "not cold: 2 copies are 0 MiB, limited by the time to make more modules of layer" in said


def test_nothing_is_saved_that_was_not_drawn(
    tiny_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(info, "available_bytes", lambda device: MB // 64)
    plot, csv_file = tmp_path / "run.png", tmp_path / "run.csv"
    arguments = [*BENCH, "--preset", "tiny", "--tokens", "512", "--min-time", "0", "--plot", str(plot)]
    assert main([*arguments, "--csv", str(csv_file)]) == 0
    printed = capsys.readouterr().out
    assert f"no plot: no row was timed, {plot} was not written" in printed
    assert " ".join(printed.split()).endswith(f"saved: {csv_file}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.csv"]
