"""Measures rows one after the other: memory, data, columns, correctness, time, and a record of each."""

import contextlib
import gc
import os
import sys
from collections.abc import Sequence

import torch

from . import choices, devices
from .baselines import COMPILE_BUDGET
from .ceilings import Ceilings, Rates
from .gate import Verdict, judge
from .measure import Samples, ratio
from .rotation import Rotation, TooLarge, format_bytes, plan_rotation
from .timers import prepare, time_prepared
from .workloads import Row, Variant, Workload, is_ours


def row_record(row: Row) -> dict:
    """The fields that all records of a row share, the timer aside."""
    stage = row.stage
    return {
        "op": row.op,
        "preset": row.preset,
        "stage": stage.kind,
        "norm": row.norm,
        "K": stage.K,
        "H": stage.H,
        "D": stage.D,
        "V": row.V,
        "T": row.T,
        "dtype": choices.DTYPE_NAMES[row.dtype],
    }


class Runner:
    """Measures rows on one device, with the ceilings of the same run beside them."""

    def __init__(self, device: str, cache_bytes: int, min_time: float, timers: Sequence[str]) -> None:
        self.device = device
        self.cache_bytes = cache_bytes
        self.min_time = min_time
        self.timers = timers
        factor = devices.CACHE_FACTORS[device]
        self.ceilings = Ceilings(device, cache_bytes, factor, devices.available_bytes(device))

    @torch.no_grad()
    def measure(self, workload: Workload, names: Sequence[str]) -> list[dict]:
        """One record per timer and column."""
        base = row_record(workload.row)
        try:
            rotation = plan_rotation(
                workload.footprint(names),
                self.cache_bytes,
                devices.available_bytes(self.device),
                cache_factor=devices.CACHE_FACTORS[self.device],
                most_copies=devices.MOST_COPIES[self.device],
            )
            return self._measure(workload, names, rotation, base)
        except TooLarge as reason:
            return self._skipped(base, names, str(reason))
        except torch.OutOfMemoryError:
            needed = workload.footprint(names)
            size = format_bytes(needed.fixed + 2 * needed.resident)
            return self._skipped(base, names, f"needs {size} and more, and the GPU ran out of memory")
        finally:
            _release_compiled()

    def _skipped(self, base: dict, names: Sequence[str], reason: str) -> list[dict]:
        progress("")
        return [_unmeasured(base, timer, name, "skipped", reason) for timer in self.timers for name in names]

    def _measure(self, workload: Workload, names: Sequence[str], rotation: Rotation, base: dict) -> list[dict]:
        progress(f"{workload.row}: {rotation.copies} copies")
        workload.allocate(rotation.copies)
        variants, failures = _build(workload, names)
        records = [
            _unmeasured(base, timer, name, "failed", reason)
            for timer in self.timers
            for name, reason in failures.items()
        ]
        if not variants:
            return records
        copies = min(variant.copies for variant in variants)
        if copies < rotation.copies:
            rotation = rotation.reduced(copies, f"{COMPILE_BUDGET:.0f} s of compilation")
        progress(f"{workload.row}: checking")
        verdicts = judge(workload, variants)
        if not all(verdict.is_right for verdict in verdicts.values()):
            return [
                _unmeasured(base, timer, name, "wrong", "") | _accuracy(verdict)
                for timer in self.timers
                for name, verdict in verdicts.items()
            ] + records
        rates = self.ceilings.measure(workload.row.dtype)
        timed = []
        for timer in self.timers:
            timed += self._time(timer, variants, copies, workload, base | _rotation(rotation), verdicts, rates)
            timed += [record for record in records if record["timer"] == timer]
        progress("")
        return timed

    def _time(
        self,
        timer: str,
        variants: Sequence[Variant],
        copies: int,
        workload: Workload,
        base: dict,
        verdicts: dict[str, Verdict],
        rates: Rates,
    ) -> list[dict]:
        progress(f"{workload.row}: timing {', '.join(variant.name for variant in variants)} by {timer}")
        prepared, failures = {}, []
        for variant in variants:
            try:
                prepared[variant.name] = prepare(timer, variant, copies)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:  # what cannot be captured, for one
                failures.append(_unmeasured(base, timer, variant.name, "failed", _one_line(failure)))
        samples = dict(zip(prepared, time_prepared(timer, list(prepared.values()), copies, self.min_time), strict=True))
        lead = next((taken for name, taken in samples.items() if is_ours(name)), None)
        timed = []
        for variant in (variant for variant in variants if variant.name in samples):
            taken = samples[variant.name]
            record = base | {"timer": timer, "variant": variant.name, "is_ours": is_ours(variant.name), "status": "ok"}
            record |= _figures(taken, workload, rates) | _accuracy(verdicts[variant.name])
            record["array_exceeds_cache"] = self.ceilings.exceeds_cache
            if record["is_ours"]:
                with variant.in_force():
                    record["plan"] = str(workload.plan())
            elif lead is not None:
                record |= _speedup(taken, lead)
            timed.append(record)
        return timed + failures


def _build(workload: Workload, names: Sequence[str]) -> tuple[list[Variant], dict[str, str]]:
    """The columns that can be built and called, and why the others cannot."""
    variants, failures = [], {}
    for name in names:
        progress(f"{workload.row}: preparing {name}")
        try:
            variant = workload.variant(name)
            with variant.in_force():
                variant.call(0)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            failures[name] = _one_line(failure)
        else:
            variants.append(variant)
    return variants, failures


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"


def _unmeasured(base: dict, timer: str, name: str, status: str, reason: str) -> dict:
    return base | {"timer": timer, "variant": name, "is_ours": is_ours(name), "status": status, "reason": reason}


def _accuracy(verdict: Verdict) -> dict:
    # JSON knows no inf and no nan.
    error = verdict.error if verdict.error < float("inf") else None
    return {"error": error, "error_bound": verdict.bound}


def _rotation(rotation: Rotation) -> dict:
    return {
        "copies": rotation.copies,
        "rotated_bytes": rotation.total_bytes,
        "cold": rotation.is_cold,
        "copies_limited_by": rotation.limit,
    }


def _figures(samples: Samples, workload: Workload, rates: Rates) -> dict:
    traffic, flops = workload.traffic(), workload.flops()
    return {
        "median_ms": samples.median * 1e3,
        "min_ms": samples.minimum * 1e3,
        "p20_ms": samples.quantile(0.2) * 1e3,
        "p80_ms": samples.quantile(0.8) * 1e3,
        "rounds": len(samples.seconds),
        "bytes": traffic,
        "gbps": traffic / samples.median * 1e-9,
        "tflops": flops / samples.median * 1e-12,
        "floor_ms": rates.floor_seconds(traffic, flops) * 1e3,
        "copy_gbps": rates.copy * 1e-9,
        "read_gbps": rates.read * 1e-9,
        "matmul_tflops": rates.matmul * 1e-12,
    }


def _speedup(baseline: Samples, ours: Samples) -> dict:
    speedup = ratio(baseline, ours)
    return {"speedup": speedup.value, "speedup_low": speedup.low, "speedup_high": speedup.high}


def _release_compiled() -> None:
    """Drop what torch.compile keeps alive: the frozen copies of a row are as large as its weights."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()


def progress(text: str) -> None:
    """One line on a terminal, overwritten by the next; nothing in a log."""
    if sys.stderr.isatty():
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            print("\r" + text[: width - 1].ljust(width - 1), end="\r", file=sys.stderr, flush=True)
