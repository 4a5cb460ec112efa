"""Runs the real engine in processes of its own, with the plugin on or off, and brings back what it did."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROMPTS = [[1, 2, 3, 4], [10, 11, 12]]
TOKENS = 20
EXPECTED = [[(prompt[-1] + 1 + i) for i in range(TOKENS)] for prompt in PROMPTS]

ENVIRONMENT = {
    "EAGLE_KERNELS_VLLM": "force",  # tests of an op's results need it to run; tests of the decision set "1"
    "EAGLE_KERNELS_VLLM_LAYER0": "0",  # on in its own tests: other tests' drafters ignore its output
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Run:
    """The results of one engine process tree."""

    results: list[dict]
    calls: list[Counter]  # one per process that called an op
    log: str
    returncode: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        return self.results[0]["tokens"]

    @property
    def accepted_length(self) -> float:
        return self.results[0]["accepted_length"]

    @property
    def lines(self) -> list[str]:
        """The plugin's log lines without time and process, each once."""
        found = re.findall(r"eagle_kernels: (.*)", self.log)
        return list(dict.fromkeys(line for line in found if "::" not in line))


@dataclass
class Engine:
    """Starts engines below one folder, which holds their checkpoints, plugins and compile cache."""

    folder: Path
    plugins: dict[str, str] = field(default_factory=dict)  # module -> source, besides the one that counts calls

    def run(self, request: dict, *, may_fail: bool = False, plugins: dict[str, str] | None = None, **env: str) -> Run:
        calls = self.folder / "calls"
        calls.mkdir(exist_ok=True)
        for file in calls.iterdir():
            file.unlink()
        path = self._install({"vllm_calls": (HERE / "vllm_calls.py").read_text(), **(plugins or {})})
        path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
        (self.folder / "request.json").write_text(json.dumps(_DEFAULTS | request))
        environment = os.environ | ENVIRONMENT | {"VLLM_CACHE_ROOT": str(self.folder / "cache"), "PYTHONPATH": path}
        command = [sys.executable, HERE / "vllm_run.py", self.folder / "request.json"]
        environment |= {"EAGLE_KERNELS_CALLS": str(calls)} | env
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as engine:
            try:
                output, errors = engine.communicate(timeout=900)
            except subprocess.TimeoutExpired:
                # Its workers too: on a busy machine they went on, and their calls counted as those of the next run.
                os.killpg(engine.pid, signal.SIGKILL)
                raise
        log = output + errors
        found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
        assert may_fail or (engine.returncode == 0 and found), log[-6000:]
        counted = [Counter(file.read_text().split()) for file in calls.iterdir()]
        return Run(json.loads(found[1]) if found else [], [count for count in counted if count], log, engine.returncode)

    def _install(self, plugins: dict[str, str]) -> str:
        """A folder for PYTHONPATH with each module and a distribution that names its register() as a vLLM plugin."""
        site = self.folder / ("site-" + "-".join(plugins))
        for module, source in plugins.items():
            info = site / f"{module}-0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (site / f"{module}.py").write_text(source)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0\n")
            (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{module} = {module}:register\n")
        return str(site)


_DEFAULTS = {"tp": 1, "compiled": False, "prompts": PROMPTS, "max_tokens": TOKENS, "num_speculative_tokens": 3} | {
    "sampling": {}
}
