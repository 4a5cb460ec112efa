"""Run the ops on a chosen backend and instruction set, through the environment variables a user would set."""

import contextlib
import os
from collections.abc import Iterator

from eagle_kernels import environment, plan


@contextlib.contextmanager
def forced(backend: str, isa: str | None = None) -> Iterator[None]:
    """Within the block, EAGLE_KERNELS_BACKEND and EAGLE_KERNELS_CPU_ISA say `backend` and `isa`."""
    names = {"EAGLE_KERNELS_BACKEND": backend, "EAGLE_KERNELS_CPU_ISA": isa or "auto"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        plan.clear()
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        plan.clear()


def usable_isas(backend: str) -> list[str | None]:
    """The instruction sets `backend` can be capped to on this machine, ascending; [None] where it has none."""
    if backend != "cpu":
        return [None]
    usable: list[str | None] = []
    for isa in environment.CPU_ISAS:
        with forced(backend, isa):
            if plan.cpu_isa() == isa:
                usable.append(isa)
    return usable
