"""Qwen 3.5's and Qwen4-Exp's modules import torchvision, for images: one that only imports, where there is none."""

import importlib.util

if importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("torchvision") is None:
    import engines.sglang.standins.sitecustomize  # noqa: F401
