"""A second SGLang plugin, for the tests: writes a line per call of our ops, and breaks one on request.

PROBE_FILE takes the lines `op shape`; PROBE_CORRUPT=op:n sets the result of an op to zero from its n-th call on (the
negative control); PROBE_HOOK names a hook target to wrap as well, as another plugin might; PROBE_DFLASH=1 lets DFlash
run; PROBE_MISTAKE is Python code that runs when the plugin is loaded.
"""

import os
from collections import Counter

# The index of `out` in the arguments of an op's primitive.
_OUT = {
    "norm_concat_linear": -1,
    "norm_concat": -1,
    "capture_hidden": 2,
    "vocab_parallel_embedding": -1,
    "add_rms_norm": -2,
}


def _write(line: str) -> None:
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(line + "\n")


class _Watched:
    """Wraps `library.primitives`, where every call of an op ends."""

    def __init__(self, primitives: object) -> None:
        self._primitives = primitives
        self._calls: Counter = Counter()
        self._corrupt, _, first = os.environ.get("PROBE_CORRUPT", ":0").partition(":")
        self._first = int(first)

    def __getattr__(self, name: str) -> object:
        primitive, op = getattr(self._primitives, name), name.removesuffix("_out").removesuffix("_few_rows")
        if op not in _OUT:
            return primitive

        def call(*args: object) -> None:
            primitive(*args)
            out = args[_OUT[op]]
            _write(f"{op} {tuple(out.shape)}")
            self._calls[op] += 1
            if op == self._corrupt and self._calls[op] >= self._first:
                out.zero_()

        return call


def register() -> None:
    if "PROBE_FILE" not in os.environ:
        return
    from eagle_kernels import library

    library.primitives = _Watched(library.primitives)
    if "PROBE_DFLASH" in os.environ:
        import dflash_on_cpu

        dflash_on_cpu.let_it_run()
    exec(os.environ.get("PROBE_MISTAKE", ""), {})
    if target := os.environ.get("PROBE_HOOK"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def hook(original: object, *args: object, **kwargs: object) -> object:
            _write(f"hook {target}")
            return original(*args, **kwargs)

        HookRegistry.register(target, hook, HookType.AROUND)
