"""The offline compile of store_context_kv's Triton kernel, for every architecture: no spills, few registers."""

from collections.abc import Callable

import pytest
import torch
from eagle_kernels.triton_kernels import store_context_kv as kernels

from compile.offline import ARCHS, Arch, Row, launches, resources
from test_store_context_kv import FORMS, make

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("arch", ARCHS)
def test_resources(arch: Arch, selected: Callable, record_binary: Callable[[Row], None]) -> None:
    made = {}
    for name, dtype in DTYPES.items():
        for form in FORMS:
            record = make(FORMS[form], dtype, 3)
            (made[f"{form}-{name}"],) = launches(lambda record=record: kernels.run(record), arch)
    faults = []
    for case, launch in selected(made).items():
        found = resources(launch, arch)
        record_binary(Row(launch.kernel.fn.__name__, case, str(arch), launch.specialization.num_warps, found))
        faults += [f"{case}: {fault}" for fault in found.faults(arch)]
        if found.registers > 64:
            faults.append(f"{case}: {found.registers} registers")
    assert not faults, "\n".join(faults)


def test_row_counts_and_strides_share_a_binary() -> None:
    """One binary for any N, number of slots and strides: a capture of another T must not compile."""
    form = FORMS["qwen3"]
    records = [make(form, torch.bfloat16, N) for N in (1, 2, 16, 33)]
    records.append(
        records[0]._replace(k_cache=torch.zeros(7, 2, 128).bfloat16(), v_cache=torch.zeros(7, 2, 128).bfloat16())
    )
    found = {launch.specialization for r in records for launch in launches(lambda r=r: kernels.run(r), 90)}
    assert len(found) == 1
