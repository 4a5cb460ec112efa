"""store_context_kv on a GPU: every form of K against float64, and that it writes its slots alone."""

import pytest
import torch

from eagle_kernels.ops.store_context_kv import store_context_kv
from guards import UnchangedTensors
from test_store_context_kv import DTYPE_IDS, DTYPES, FORMS, check_written, make

pytestmark = pytest.mark.usefixtures("gpu_backend")


@pytest.mark.parametrize(("N", "index"), [(0, torch.int64), (1, torch.int32), (33, torch.int32), (45, torch.int64)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_matches_float64_and_writes_its_slots_alone(dtype: torch.dtype, form: str, N: int, index: torch.dtype) -> None:
    record = make(FORMS[form], dtype, N, index, device="cuda")
    read = [tensor for tensor in record[:-2] if isinstance(tensor, torch.Tensor)]
    with UnchangedTensors([record.kv._base, *read[1:]]):
        store_context_kv(record)
    check_written(record)
