"""Norms, a cat and a linear layer of SGLang, or one norm and the layer, as one op inside of SGLang's own forward.

The norms set their inputs aside and return a view without columns, so that SGLang's own cat has nothing to copy, and
the linear layer norms, concatenates and projects what was set aside. The modules and their parameters stay where they
are, so weights are loaded and updated as before.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import log_once
from ..projection import EngineProjection
from .hooks import LOGGER
from .stage import decide
from .unsupported import read_by_op

Place = tuple[Any, str]  # a module, and the name of one of its own


class NormedLinear:
    """Replaces the forward of its modules: the norms, in the order of the cat, and the linear layer."""

    def __init__(self, name: str, norms: Sequence[Place], linear: Place, norm_offset: float = 0.0) -> None:
        self.name, self.places = name, (*norms, linear)
        self.modules: tuple[Any, ...] = tuple(getattr(owner, attribute) for owner, attribute in self.places)
        self.forwards = tuple(module.forward for module in self.modules)
        *own_norms, own_linear = self.modules
        self.projection = EngineProjection(
            read_by_op(own_linear), len(own_norms), chunk_norms=own_norms, norm_offset=norm_offset
        )
        # SGLang's own layers return a bias that was not added beside the result; nn.Linear does not.
        self.returns_bias = type(own_linear) is not nn.Linear
        self.aside: dict[int, Tensor] = {}
        self.asked: set[int] = set()  # the norms that this forward has called

    def put_in_where_faster(self) -> None:
        """Decide, log it, and put it in where the op runs at any row count."""
        self.projection, self.decision = decide(self.name, self.projection, self._engine)
        if self.decision.never:
            return
        *norms, linear = self.modules
        for k, norm in enumerate(norms):
            norm.forward = functools.partial(self._norm, k)  # no closure: a copy of the model has the copy's norms
        linear.forward = self._project

    def _engine(self, packed: Tensor) -> Tensor:
        """SGLang's own stage on [N, K*H]."""
        projected = self._own(packed.chunk(len(self.modules) - 1, -1))
        return projected[0] if self.returns_bias else projected

    def _own(self, chunks: Sequence[Tensor]) -> Any:
        *norms, linear = self.forwards
        # IQuest-Q1's norms return fp32 for fp32 states, which it then rounds; the others return the layer's dtype.
        dtype = self.projection.like.dtype
        normed = [norm(chunk).to(dtype) for norm, chunk in zip(norms, chunks, strict=True)]
        return linear(normed[0] if len(normed) == 1 else torch.cat(normed, -1))

    def _norm(self, k: int, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if k in self.asked:  # left over from a forward that did not finish
            self.aside, self.asked = {}, set()
        # The first norm of a forward decides for both: SGLang may give them different numbers of rows.
        takes = len(self.aside) > 0 if self.asked else not (args or kwargs) and self._takes(x.shape[0])
        self.asked.add(k)
        if not takes:
            return self.forwards[k](x, *args, **kwargs)
        self.aside[k] = x
        return x[:, :0]

    def _takes(self, rows: int) -> bool:
        # A module wrapped since (LoRA) would see views without columns.
        whole = all(
            getattr(owner, attribute) is module
            for (owner, attribute), module in zip(self.places, self.modules, strict=True)
        )
        return whole and self.decision.runs_op(rows)

    def _project(self, x: Tensor) -> Any:
        aside, self.aside, self.asked = self.aside, {}, set()
        if len(aside) != len(self.modules) - 1:  # an idle batch comes without norms
            return self.forwards[-1](x)
        # In a captured prefill of Qwen 3.5 the target has fewer rows; zeros follow after its norm, which nothing reads.
        chunks = [_of_rows(aside[k], x.shape[0]) for k in range(len(aside))]
        try:
            projected = self.projection(chunks)
            return (projected, None) if self.returns_bias else projected
        except Exception as failure:
            self.decision = Decision()
            attribute = self.places[-1][1]
            message = f"{attribute} stays with SGLang, {self.projection.op} failed: {failure!r}"
            log_once(LOGGER, logging.WARNING, message)
            return self._own(chunks)


def _of_rows(x: Tensor, rows: int) -> Tensor:
    return x if x.shape[0] == rows else F.pad(x[:rows], (0, 0, 0, max(0, rows - x.shape[0])))
