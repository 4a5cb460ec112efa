"""tuned_configs: the tables' reader, and what the heuristic promises to the kernels."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_kernels.model_shapes import model_shapes
from eagle_kernels.tuned_configs import CONFIGS, SPLIT_ROWS, Gpu, Tiles, choose_tiles, gpu_of, heuristic

H100 = Gpu("NVIDIA H100 80GB HBM3", 90, 227 << 10)
GPUS = [
    Gpu("NVIDIA A100-SXM4-80GB", 80, 163 << 10),
    Gpu("NVIDIA L40S", 89, 99 << 10),
    H100,
    Gpu("NVIDIA B200", 100, 227 << 10),
    Gpu("NVIDIA RTX PRO 6000 Blackwell", 120, 99 << 10),
    Gpu("AMD Instinct MI300X", "gfx942", 64 << 10),
]
TILES = {
    "BT": 16,
    "BD": 32,
    "BK": 128,
    "splits": 2,
    "swap": False,
    "num_warps": 4,
    "num_stages": 5,
    "finalize_columns": 256,
}
SIZES = (3, 4096, 4096, torch.bfloat16)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    entry = {"K": 3, "H": 4096, "D": 4096, "dtype": "bfloat16"}
    rows = {"1": TILES | {"BD": 16}, "16": TILES, "64": TILES | {"BT": 64, "BD": 128, "swap": True}, "256": None}
    text = json.dumps({"norm_concat_linear": [entry | {"rows": rows}]})
    (tmp_path / "NVIDIA_H100_80GB_HBM3.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("T", "nearest"), [(0, 1), (1, 1), (3, 1), (5, 16), (31, 16), (33, 64), (127, 64), (129, 256), (10**6, 256)]
)
def test_the_nearest_entry_in_log_space(T: int, nearest: int, directory: Path) -> None:
    tiles, reason = choose_tiles(H100, T, *SIZES, has_residuals=False, directory=directory)
    assert reason == f"T={nearest} is the tuned entry nearest to T={T}"
    expected = {1: Tiles(**TILES | {"BD": 16}), 16: Tiles(**TILES), 256: None}
    assert nearest == 64 or tiles == expected[nearest]


def test_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = {"name": "NVIDIA H200", "major": 9, "minor": 0, "shared_memory_per_block_optin": 227 << 10}
    mi300x = {"name": "AMD Instinct MI300X", "major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}
    for properties, processors, hip, expected in (
        (h200, 132, None, Gpu("NVIDIA H200", 90, 227 << 10, 132)),
        (h200 | {"major": 12, "minor": 1}, 188, None, Gpu("NVIDIA H200", 121, 227 << 10, 188)),
        # ROCm's torch has no field for the shared memory of a program, which is 64 KB.
        (mi300x, 304, "7.2", Gpu("AMD Instinct MI300X", "gfx942", 64 << 10, 304)),
    ):
        answer = SimpleNamespace(**properties, multi_processor_count=processors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, answer=answer: answer)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert gpu_of.__wrapped__(torch.device("cuda", 0)) == expected


def test_a_residual_takes_stages_that_do_not_fit(directory: Path) -> None:
    tiles, _ = choose_tiles(H100, 64, *SIZES, has_residuals=False, directory=directory)
    with_residuals, _ = choose_tiles(H100, 64, *SIZES, has_residuals=True, directory=directory)
    assert tiles.num_stages == 4 and with_residuals.num_stages == 3  # stages of 48 and 64 KB


def test_a_tuned_shape_logs_nothing(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        choose_tiles(H100, 16, *SIZES, has_residuals=False, directory=directory)
    assert not caplog.records


def test_a_missing_shape_is_logged_once(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "eagle_kernels"):
        for T in (1, 2, 300):
            _, reason = choose_tiles(H100, T, 3, 2880, 2880, torch.float16, has_residuals=False, directory=directory)
            assert "heuristic" in reason
    (record,) = caplog.records
    assert "`eagle-kernels tune --op norm_concat_linear --chunks 3 --hidden 2880 --out 2880" in record.getMessage()


def test_the_shipped_tables_can_be_read() -> None:
    for path in CONFIGS.glob("*.json"):
        for entry in json.loads(path.read_text())["norm_concat_linear"]:
            assert all(fields is None or Tiles(**fields) for fields in entry["rows"].values()), path


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: str(gpu.arch))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_the_heuristic_on_every_preset(dtype: torch.dtype, gpu: Gpu, tmp_path: Path) -> None:
    """Few plans; stages that fit; enough programs, but no more splits than that takes; many T go to the library."""
    for model in model_shapes().values():
        for stage in model.stages:
            sizes = (stage.K, stage.H, stage.D, dtype)
            for has_residuals in (False, True):
                facts = {"has_residuals": has_residuals, "directory": tmp_path}
                chosen = [choose_tiles(gpu, T, *sizes, **facts)[0] for T in range(1, 257)]
                plans = dict.fromkeys(chosen)
                assert len(plans) == (2 if dtype == torch.float32 else 5) and chosen[-1] is None
                for tiles in filter(None, plans):
                    stage_bytes = (tiles.BT * (1 + has_residuals) + tiles.BD) * tiles.BK * dtype.itemsize
                    assert tiles.num_stages >= 2 and tiles.num_stages * stage_bytes <= gpu.shared_memory
                    programs = stage.K * tiles.splits * -(-stage.D // tiles.BD)
                    assert programs >= 128 and (tiles.splits == 1 or programs < 512)


@pytest.mark.parametrize(
    ("arch", "T", "dtype", "block"),
    [
        (80, 16, torch.bfloat16, (16, 64, False, 4)),
        (90, 17, torch.bfloat16, (32, 64, False, 8)),
        (80, 64, torch.bfloat16, (64, 64, False, 4)),
        (80, 65, torch.bfloat16, (128, 64, False, 8)),
        # The weight is the left operand of wgmma and tcgen05.
        (90, 64, torch.bfloat16, (64, 128, True, 8)),
        (100, 64, torch.bfloat16, (64, 128, True, 4)),
        (103, 65, torch.bfloat16, (128, 128, True, 8)),
        (120, 64, torch.bfloat16, (64, 64, False, 4)),
        (90, 16, torch.float32, (16, 64, False, 8)),
    ],
)
def test_the_heuristic_s_tiles(arch: int, T: int, dtype: torch.dtype, block: tuple) -> None:
    tiles = heuristic(Gpu("any", arch, 227 << 10), T, 3, 4096, 4096, dtype)
    assert (tiles.BT, tiles.BD, tiles.swap, tiles.num_warps) == block
    assert tiles.finalize_columns == (512 if tiles.BT <= 32 else 1024)


@pytest.mark.parametrize("dtype", SPLIT_ROWS, ids=str)
def test_split_only_has_tiles_for_every_row_count(dtype: torch.dtype, tmp_path: Path) -> None:
    facts = {"has_residuals": False, "directory": tmp_path}
    most, _ = choose_tiles(H100, SPLIT_ROWS[dtype], 3, 4096, 4096, dtype, **facts)
    for T in (SPLIT_ROWS[dtype] + 1, 10**6):
        assert choose_tiles(H100, T, 3, 4096, 4096, dtype, **facts)[0] is None
        tiles, reason = choose_tiles(H100, T, 3, 4096, 4096, dtype, split_only=True, **facts)
        assert tiles == most
        assert reason.startswith(f"T={SPLIT_ROWS[dtype]} <= ")
