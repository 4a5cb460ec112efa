"""Times a drafter's combine_hidden_states on CPU: vLLM's own modules as vLLM runs them, and the plugin's projection.

`python tests/engines/vllm/time_combine.py result.json`, in the environment of `make test-vllm`. Four copies of every
weight take turns so that none is in a cache, and the variants take turns so that a noisy neighbour slows all of them.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from eagle_kernels.bench.info import read_environment
from torch import Tensor, nn
from vllm import __version__
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear

from eagle_kernels.engines.projection import EngineProjection

K, H, D, COPIES = 3, 4096, 4096, 4


def main(path: Path) -> None:
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    norms = nn.ModuleList(RMSNorm(H) for _ in range(K))
    packed, dense = linears(keep_dense=False), linears(keep_dense=True)
    variants = {
        "vllm": [vllms_own(norms, fc) for fc in packed],
        "norm_concat + vllm's fc": [
            EngineProjection(fc, K, chunk_norms=norms, fc_unsupported="packed") for fc in packed
        ],
        "norm_concat_linear": [EngineProjection(fc, K, chunk_norms=norms) for fc in dense],
    }
    records = []
    for T in (1, 4, 8, 16, 32, 64, 128, 512):
        x = torch.randn(T, K * H)
        for stages in variants.values():
            torch.testing.assert_close(stages[0](x), variants["vllm"][0](x), rtol=0.02, atol=0.1)
        times = {name: [] for name in variants}
        for _ in range(12 if T < 512 else 5):
            for name, stages in variants.items():
                times[name] += [seconds(stage, x) for stage in stages]
        records += [
            {"T": T, "variant": name, "median_ms": 1e3 * sorted(all_)[len(all_) // 2], "min_ms": 1e3 * min(all_)}
            for name, all_ in times.items()
        ]
        print(T, {record["variant"]: round(record["median_ms"], 2) for record in records[-len(variants) :]}, flush=True)
    facts = {"vllm": __version__, **read_environment("cpu")}
    sizes = {"K": K, "H": H, "D": D, "dtype": "bf16", "norm": "chunk"}
    path.write_text(json.dumps({"environment": facts, "sizes": sizes, "records": records}, indent=1) + "\n")


def linears(keep_dense: bool) -> list[ReplicatedLinear]:
    made = []
    torch.manual_seed(0)
    for _ in range(COPIES):
        fc = ReplicatedLinear(K * H, D, bias=False, return_bias=False)
        fc.weight.data.normal_(0, 0.02)
        fc._cpu_skip_gemm_dispatch = keep_dense
        fc.quant_method.process_weights_after_loading(fc)
        made.append(fc)
    return made


def vllms_own(norms: nn.ModuleList, fc: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: fc(torch.cat([norm(chunk) for norm, chunk in zip(norms, x.chunk(K, -1), strict=True)], -1))


def seconds(stage: Callable[[Tensor], Tensor], x: Tensor) -> float:
    start = time.perf_counter()
    stage(x)
    return time.perf_counter() - start


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        main(Path(sys.argv[1]))
