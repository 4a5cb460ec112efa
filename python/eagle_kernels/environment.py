"""The environment variables of the package. At run time nothing else reads any, but for one library (below).

| variable | values | meaning |
|---|---|---|
| EAGLE_KERNELS_BACKEND | auto, cuda, triton, cpu, reference | force one backend; an unsupported choice is an error |
| EAGLE_KERNELS_BATCH_INVARIANT | 0, 1 | one plan for all T: a row's bits do not depend on how many rows run with it |
| EAGLE_KERNELS_EARLY_WEIGHT | 0, 1 | 0: no CUDA kernel copies the weight before the previous one has ended |
| EAGLE_KERNELS_HUGE_PAGES | 0, 1 | 0: weights on a CPU stay in the pages that they were allocated in |
| EAGLE_KERNELS_CPU_ISA | auto, scalar, avx2, avx512, avx512_bf16, amx_bf16 | cap the CPU kernels' instruction set |
| EAGLE_KERNELS_VLLM, EAGLE_KERNELS_SGLANG | 0, 1, force | 0: the plugin is off; force: on also where it is slower |
| EAGLE_KERNELS_VLLM_<PART>, EAGLE_KERNELS_SGLANG_<PART> | 0, 1 | one part of it; docs/reference.md lists the parts |

TRITON_INTERPRET=1, a variable of Triton's, lets the triton backend run CPU tensors in Triton's interpreter, for tests.

The build reads others, in `setup.py`: docs/reference.md has them all. A library that is built with
alternatives of the fused CUDA kernel, for benchmarks alone, reads a few more in csrc/cuda/cut.cuh
(docs/benchmarking.md).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

BACKENDS = ("cuda", "triton", "cpu", "reference")
CPU_ISAS = ("scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Settings:
    """What the environment asked for; None means the package chooses."""

    backend: str | None
    batch_invariant: bool
    cpu_isa: str | None
    triton_interpret: bool
    early_weight: bool = True
    huge_pages: bool = True
    wrong: str | None = None  # the message about an invalid value; every call raises it


def _choice(name: str, choices: tuple[str, ...]) -> str | None:
    value = os.environ.get(name, "auto").lower()
    if value in ("", "auto"):
        return None
    if value not in choices:
        raise ValueError(f"eagle_kernels: {name} is {value!r}, expected one of {('auto', *choices)}")
    return value


def read_settings() -> Settings:
    """Read the environment now; importing the package does this once. Never raises: the first call does."""
    try:
        return _read_settings()
    except ValueError as wrong:
        return Settings(None, False, None, False, wrong=str(wrong))


def _read_settings() -> Settings:
    return Settings(
        backend=_choice("EAGLE_KERNELS_BACKEND", BACKENDS),
        batch_invariant=_choice("EAGLE_KERNELS_BATCH_INVARIANT", ("0", "1")) == "1",
        cpu_isa=_choice("EAGLE_KERNELS_CPU_ISA", CPU_ISAS),
        early_weight=_choice("EAGLE_KERNELS_EARLY_WEIGHT", ("0", "1")) != "0",
        huge_pages=_choice("EAGLE_KERNELS_HUGE_PAGES", ("0", "1")) != "0",
        # Triton's spellings of true.
        triton_interpret=os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"),
    )


@dataclass(frozen=True)
class EngineSwitches:
    """What EAGLE_KERNELS_<ENGINE> and EAGLE_KERNELS_<ENGINE>_<PART> asked for."""

    parts: frozenset[str]  # those that are on
    force: bool  # a stage runs on the ops also where the engine's own code is faster
    wrong: tuple[str, ...]  # a message for each unknown variable or invalid value


def engine_switches(engine: str, defaults: Mapping[str, bool]) -> EngineSwitches:
    """The switches of an engine's plugin; `defaults` says for each part whether it is on by default.

    Never raises. An invalid value turns off what its variable switches: it is more often meant as "off" or "no" than as
    "on", and the engine works without it. An unknown variable changes nothing.

    >>> engine_switches("vllm", {"combine": True, "embedding": False}).parts
    frozenset({'combine'})
    """
    switch, wrong = f"EAGLE_KERNELS_{engine.upper()}", []

    def read(name: str, choices: tuple[str, ...]) -> str | None:
        try:
            return _choice(name, choices)
        except ValueError as failure:
            wrong.append(f"{str(failure).removeprefix('eagle_kernels: ')}; read as 0")
            return "0"

    plugin = read(switch, ("0", "1", "force"))
    names = {f"{switch}_{part.upper()}": part for part in defaults}
    values = {part: read(name, ("0", "1")) for name, part in names.items()}
    for name in sorted(os.environ):
        if name.startswith(switch) and name != switch and name not in names:
            from difflib import get_close_matches  # imported only where a name is misspelled

            (nearest,) = get_close_matches(name, names, 1, 0.0)
            wrong.append(f"{name} is not a variable of the plugin and changes nothing, did you mean {nearest}?")
    on = {part for part, value in values.items() if (defaults[part] if value is None else value == "1")}
    return EngineSwitches(frozenset() if plugin == "0" else frozenset(on), plugin == "force", tuple(wrong))
