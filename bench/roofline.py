"""Measure this machine's copy and read bandwidth and matmul rate, and the floor they set for each shape and T."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from . import choices, devices, selection
from .ceilings import Ceilings, Rates
from .environment_header import format_header, read_environment
from .projection_workload import NormConcatLinear
from .results import SCHEMA_VERSION, write_text
from .workloads import Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", type=choices.one_of("device", devices.DEVICES), default="cuda", help="cuda (default), cpu")
    selection.add_arguments(parser)
    add("--tokens", type=choices.row_counts, default=choices.row_counts("1:4096:x4"), metavar="T", help="values of T")
    add("--dtype", type=choices.dtypes, default=["bf16"], help="bf16,fp16,fp32 (default bf16)")
    add("--threads", type=choices.number(1), default=torch.get_num_threads(), help="of torch (default: its own)")
    add("--min-time", type=choices.number(0, float), default=1.0, help="seconds per ceiling (default 1)")
    add("--json", type=Path, metavar="FILE", help="save the ceilings")


def run(arguments: argparse.Namespace) -> int:
    device = arguments.device
    if (reason := devices.unusable_reason(device)) is not None:
        arguments.parser.error(f"no CUDA device: {reason}; --device cpu measures this machine's processor")
    torch.set_num_threads(arguments.threads)
    environment = read_environment(device)
    print(format_header(environment), flush=True)
    stages = selection.stages(arguments)
    available = devices.available_bytes(device)
    ceilings = Ceilings(device, environment["cache_bytes"], devices.CACHE_FACTORS[device], available)
    measured: dict[str, Rates] = {}
    for dtype in arguments.dtype:
        rates = measured[dtype] = ceilings.measure(choices.DTYPES[dtype], arguments.min_time)
        copy, read = rates.copy * 1e-9, rates.read * 1e-9
        print(f"\n{dtype}: copy {copy:.1f} GB/s, read {read:.1f} GB/s, matmul {rates.matmul * 1e-12:.2f} TFLOP/s")
        _print_floors(arguments, stages, dtype, rates)
    if arguments.json is not None:
        ceilings_by_dtype = {dtype: asdict(rates) for dtype, rates in measured.items()}
        run = {"schema_version": SCHEMA_VERSION, "argv": arguments.argv, "environment": environment, "records": []}
        write_text(arguments.json, json.dumps(run | {"rates": ceilings_by_dtype}, indent=1) + "\n")
        print(f"saved: {arguments.json}")
    return 0


def _print_floors(arguments: argparse.Namespace, stages: list[selection.Stage], dtype: str, rates: Rates) -> None:
    print(f"{'norm_concat_linear':<40}{'T':>7}{'MB':>10}{'GFLOP':>10}{'floor us':>11}  bound")
    for preset, stage, V in stages:
        name = f"{preset}:{stage.kind} K={stage.K} H={stage.H} D={stage.D}"
        for T in arguments.tokens:
            row = Row("norm_concat_linear", preset, stage, selection.norm_of(stage), V, T, choices.DTYPES[dtype])
            workload = NormConcatLinear(row)
            traffic, flops = workload.traffic(), workload.flops()
            floor = rates.floor_seconds(traffic, flops)
            bound = "matmul" if floor > rates.floor_seconds(traffic, 0) else "memory"
            print(f"{name:<40}{T:>7}{traffic * 1e-6:>10.1f}{flops * 1e-9:>10.2f}{floor * 1e6:>11.1f}  {bound}")
            name = ""
