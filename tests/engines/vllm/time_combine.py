"""Times a drafter's combine_hidden_states in vLLM on CPU, with the plugin and without: `make bench-vllm`.

Compares vLLM's own method on vLLM's own modules, its weight packed as vLLM packs it, with a drafter of the plugin,
which decides at load what runs (`engines/decision.py`). They take turns, and 256 MB are read before each call, as an
engine reads its target's weights there, so that no call finds its weight in a cache. Where the plugin left the weight
packed both read the same copy: two copies of 100 MB differed by up to 13 % by their addresses. `product` is vLLM's
product alone, without norms and cat.

`python time_combine.py bench/results` runs a process per number of threads; `--threads 2` prints the records of one.
"""

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

K, DTYPE = 3, "bf16"
NORMS, WIDTHS, ROWS, THREADS = ("chunk", "concat", "none"), (128, 2048, 4096), (1, 4, 16, 512), (1, 2)
# For one row of the table; all 72 take 6 minutes.
SECONDS, MIN_ROUNDS, MAX_ROUNDS = 4.0, 15, 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, help="bench/results: the machine's folder is made below it")
    parser.add_argument("--threads", type=int, help="print the records of this many threads, in this process")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        print(json.dumps(measured(arguments.threads)))
        return
    records = [record for threads in THREADS for record in json.loads(output_of(threads))]
    from eagle_kernels.bench.info import read_environment
    from vllm import __version__

    environment = read_environment("cpu") | {"vllm": __version__}
    path = arguments.results / environment["device_slug"] / "vllm_combine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = {"environment": environment, "sizes": {"K": K, "dtype": DTYPE}, "records": records}
    path.write_text(json.dumps(saved, indent=1) + "\n", "utf-8")
    print(path)


def output_of(threads: int) -> str:
    """In a process of its own: OpenMP and vLLM's library read the number of threads only once."""
    command = [sys.executable, os.fspath(Path(__file__)), "--threads", str(threads)]
    variables = {"OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]


def measured(threads: int) -> list[dict]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    from eagle_kernels.environment import engine_switches

    assert torch.get_num_threads() == threads
    with set_current_vllm_config(VllmConfig()), torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        from eagle_kernels.engines import vllm as plugin
        from eagle_kernels.engines.vllm import combine, registry

        init_distributed_environment(1, 0, f"file://{folder}/init", 0, "gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        registry.switches = engine_switches("vllm", plugin.PARTS | plugin.OPTIONS)
        combine.register()
        return [record | {"threads": threads} for norm in NORMS for H in WIDTHS for record in rows_of(norm, H)]


def rows_of(norm: str, H: int) -> Iterator[dict]:
    import torch

    from eagle_kernels.engines.decision import EVICTED_BYTES
    from eagle_kernels.engines.vllm import combine

    on = loaded(combine.hooked(drafter_class(norm, H)))
    stage = on.eagle_kernels_stage()
    off = loaded(drafter_class(norm, H)) if on.model.fc.weight.numel() else vllms_own(on)
    print(norm, H, "vLLM" if stage is None else combine._sentence(stage), file=sys.stderr, flush=True)
    evicted = torch.zeros(EVICTED_BYTES // 4, dtype=torch.float32)
    for T in ROWS:
        x = torch.randn(T, K * H)
        calls = {"off": off.combine_hidden_states, "on": on.combine_hidden_states, "product": off.model.fc}
        torch.testing.assert_close(calls["on"](x), calls["off"](x), rtol=0.05, atol=0.1)
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)  # shuffled: always after the same one, one may take 20 us more of 100
        start = time.perf_counter()
        while len(times["on"]) < MIN_ROUNDS or (
            len(times["on"]) < MAX_ROUNDS and time.perf_counter() - start < SECONDS
        ):
            for name in random.sample(names, len(names)):
                evicted.sum()
                times[name].append(seconds(calls[name], x))
        medians = {f"{name}_ms": round(1e3 * statistics.median(of_call), 4) for name, of_call in times.items()}
        minima = {f"{name}_min_ms": round(1e3 * min(of_call), 4) for name, of_call in times.items()}
        ran = None if stage is None or not stage.projection.has_norm else stage.projection_at(T)
        record = {"norm": norm, "H": H, "T": T, "ran": "vLLM" if ran is None else ran.op, **medians, **minima}
        print(record, file=sys.stderr, flush=True)
        yield record | {"rounds": len(times["on"])}


def drafter_class(norm: str, H: int) -> type:
    """vLLM's method on the modules that it reads in a drafter's model, without the model's layers."""
    import torch
    from torch import nn
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    class Drafter(nn.Module):
        combine_hidden_states = Eagle3LlamaForCausalLM.combine_hidden_states

        def __init__(self, *, vllm_config: SimpleNamespace, prefix: str = "") -> None:
            super().__init__()
            model = self.model = nn.Module()
            model.use_aux_hidden_state, model.num_aux_hidden_states = True, K
            model.norm_before_fc = norm == "concat"
            model.input_norm = RMSNorm(K * H) if norm == "concat" else None
            model.fc_norm = nn.ModuleList(RMSNorm(H) for _ in range(K)) if norm == "chunk" else None
            model.fc = ReplicatedLinear(K * H, H, bias=False, return_bias=False)
            torch.manual_seed(0)
            model.fc.weight.data.normal_(0, 0.02)

    return Drafter


def loaded(drafter_class: type) -> object:
    """What vLLM's loader does after it has loaded the weights."""
    hf_config = SimpleNamespace(num_aux_hidden_states=K)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf_config)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
    )
    drafter = drafter_class(vllm_config=config)
    drafter.model.fc.quant_method.process_weights_after_loading(drafter.model.fc)
    if hasattr(drafter, "process_weights_after_loading"):
        drafter.process_weights_after_loading()
    return drafter


def vllms_own(drafter: object) -> SimpleNamespace:
    """vLLM's method on a drafter's modules, which the plugin left in vLLM's layout."""
    method = type(drafter).__mro__[2].combine_hidden_states
    return SimpleNamespace(model=drafter.model, combine_hidden_states=functools.partial(method, drafter))


def seconds(call: Callable, x: object) -> float:
    start = time.perf_counter()
    call(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
