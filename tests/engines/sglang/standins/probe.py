"""A second SGLang plugin, for the tests: writes a line per call of our ops, and breaks one on request.

PROBE_FILE takes the lines `op shape`; PROBE_CORRUPT names an op whose result becomes zero (the negative control);
PROBE_HOOK names a hook target to wrap as well, as another plugin might.
"""

import os
from collections.abc import Callable

OPS = ("norm_concat_linear", "norm_concat", "capture_hidden", "vocab_parallel_embedding", "add_rms_norm")


def _write(line: str) -> None:
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(line + "\n")


def _watched(name: str, op: Callable) -> Callable:
    def call(*args: object, **kwargs: object) -> object:
        result = op(*args, **kwargs)
        _write(f"{name} {tuple(result.shape)}")
        if os.environ.get("PROBE_CORRUPT") == name:
            result.zero_()
        return result

    return call


def register() -> None:
    if "PROBE_FILE" not in os.environ:
        return
    from eagle_kernels import ops

    # The public functions: a call with `out` may go past the registered op. SGLang loads this plugin first, the path of
    # standins/ being in front, and ours imports the functions when it registers.
    for name in OPS:
        setattr(ops, name, _watched(name, getattr(ops, name)))
    if target := os.environ.get("PROBE_HOOK"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def hook(original: object, *args: object, **kwargs: object) -> object:
            _write(f"hook {target}")
            return original(*args, **kwargs)

        HookRegistry.register(target, hook, HookType.AROUND)
