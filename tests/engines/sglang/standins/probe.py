"""A second SGLang plugin, for the tests: writes a line per call of our ops, and breaks one on request.

PROBE_FILE takes the lines `op shape`; PROBE_CORRUPT names an op whose result becomes zero (the negative control);
PROBE_HOOK names a hook target to wrap as well, as another plugin might.
"""

import os

import torch

OPS = ("norm_concat_linear", "norm_concat", "capture_hidden_out", "vocab_parallel_embedding", "add_rms_norm")


def _write(line: str) -> None:
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(line + "\n")


def _watched(name: str, op: object) -> object:
    def call(*args: object) -> object:
        result = op(*args)
        shape = tuple(result.shape) if isinstance(result, torch.Tensor) else tuple(args[0].shape)
        _write(f"{name} {shape}")
        if os.environ.get("PROBE_CORRUPT") == name:
            result.zero_()
        return result

    return call


def register() -> None:
    if "PROBE_FILE" not in os.environ:
        return
    import eagle_kernels  # noqa: F401  registers the ops

    for name in OPS:
        setattr(torch.ops.eagle_kernels, name, _watched(name, getattr(torch.ops.eagle_kernels, name)))
    if target := os.environ.get("PROBE_HOOK"):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def hook(original: object, *args: object, **kwargs: object) -> object:
            _write(f"hook {target}")
            return original(*args, **kwargs)

        HookRegistry.register(target, hook, HookType.AROUND)
