"""Which backends and instruction sets can be tested here, and how to activate one."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from eagle_kernels import environment, library, plan


@contextlib.contextmanager
def environment_of(**variables: str) -> Iterator[None]:
    """The package as it behaves under these environment variables."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            plan.clear()
            yield
    finally:  # a test that fails must not leave its plans to those behind it
        plan.clear()


@contextlib.contextmanager
def fused_up_to(rows: int) -> Iterator[None]:
    """The package as it behaves where plans take the fused CPU kernel for up to `rows` rows, and the one for few rows
    never; -1: neither."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "DENSE_DOTS_ROWS", {})
            for limits in plan.FUSED_ROWS.values():
                for isa in limits:
                    patch.setitem(limits, isa, rows)
            plan.clear()
            yield
    finally:
        plan.clear()


def usable_isas() -> list[str]:
    """The instruction sets of the compiled kernels that this build and this machine have, in ascending order."""
    if library.unsupported_reason is not None:
        return []
    put_in_force = torch.ops.eagle_kernels_C.set_cpu_isa
    return [isa for code, isa in enumerate(environment.CPU_ISAS) if put_in_force(code) == code]


CPU_ISAS = usable_isas()
needs_compiled = pytest.mark.skipif(not CPU_ISAS, reason=f"no compiled kernels: {library.unsupported_reason}")
# oneDNN needs AVX-512 to multiply bf16, which one 2-core CPU that CI has run on does not have.
needs_packing = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies no bf16 on this CPU"
)
