"""Where a projection of SGLang runs on our op: at the row counts where that is faster than SGLang's own modules.

Decided when the model runner has loaded a model, before graphs are captured and before the first request.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from .. import decision
from ..decision import Call, Decision
from ..eligibility import log_once
from ..gates import Target
from ..projection import EngineProjection, probe
from ..row_parallel import split, unsupported_reason
from .hooks import LOGGER, Hook, leaving_to_sglang

# Set by `register`: EAGLE_KERNELS_SGLANG=force and EAGLE_KERNELS_SGLANG_ROW_PARALLEL=1.
force = False
row_parallel = False


def after_loading(prepare: Callable[[nn.Module], None]) -> Hook:
    """A hook that prepares each module of a model that has been loaded."""

    def loaded(result: None, runner: Any) -> None:
        for module in runner.model.modules():
            prepare(module)

    return Hook(Target("sglang.srt.model_executor.model_runner:ModelRunner.load_model", ("self",)), "AFTER", loaded)


def decide(name: str, projection: EngineProjection, engine: Call) -> tuple[EngineProjection, Decision]:
    """The projection, row-parallel where that is on, and the row counts at which it runs, logged with the figures;
    `never` where it fails."""
    decided = Decision(reason="it failed")
    with leaving_to_sglang(name):
        split = _split(name, projection, engine) if row_parallel else None
        projection, decided = split or (projection, _decide(name, projection, engine))
        runs, figures = f"{projection.op} ({projection.kind})", decided.figures("SGLang")
        if decided.never:
            because = f"{runs} is not faster, {figures}" if decided.rows else figures
            log_once(LOGGER, logging.INFO, f"{name} stays with SGLang: {because}")
        else:
            where = "" if decided.always else " where it is faster"
            log_once(LOGGER, logging.INFO, f"{name} runs {runs}{where}; {figures}")
    return projection, decided


def _split(name: str, projection: EngineProjection, engine: Call) -> tuple[EngineProjection, Decision] | None:
    from sglang.srt.runtime_context import get_parallel

    parallel, weight = get_parallel(), projection.fc.weight
    group = parallel.tp_group
    unsupported = unsupported_reason(projection, weight.shape[1], group.world_size)
    if weight.shape[0] != getattr(projection.fc, "output_size", weight.shape[0]):
        unsupported = unsupported or "SGLang splits it by rows"
    if parallel.attn_tp_size != group.world_size:
        unsupported = unsupported or "ranks have different tokens (DP attention)"
    if unsupported is not None:
        log_once(LOGGER, logging.INFO, f"{name} is not row-parallel: {unsupported}")
        return None
    return split(
        projection,
        weight,
        decision.ROWS[-1],
        engine,
        rank=group.rank_in_group,
        size=group.world_size,
        all_reduce=group.all_reduce,
        group=group.cpu_group,
    )


def _decide(name: str, projection: EngineProjection, engine: Call) -> Decision:
    weight, rows = projection.like, decision.ROWS
    columns, width = projection.fc.weight.shape
    check = functools.partial(probe, projection, width, weight, rows[-1], engine)
    if force:
        check()
        return decision.FORCED
    group = _cpu_group()
    if group is not None and _ranks_come_and_go():
        return Decision(reason="with elastic expert parallelism a rank that joins later has no others to decide with")
    projection.use_huge_pages()
    agree = functools.partial(decision.agreed_seconds, group=group)
    key = (name, projection.kind, columns)
    theirs, ours = decision.timed(key, [engine, projection], rows, width, weight, check, agree)
    return Decision(rows, theirs, ours)


def _ranks_come_and_go() -> bool:
    from sglang.srt.runtime_context import get_context

    context = get_context()
    published = context.is_config_namespace_published("exec")
    return published and context.config_bag("exec").moe.elastic_ep_backend is not None


def _cpu_group() -> Any:
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    return group.cpu_group if group.world_size > 1 else None
