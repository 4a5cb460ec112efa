"""Two norms, a cat and a linear layer of SGLang as one op inside of SGLang's own forward.

The norms set their inputs aside and hand on a view without columns, so that SGLang's own cat has nothing to copy, and
the linear layer norms, concatenates and projects what was set aside. The modules and their parameters stay where they
are, so loading and updating weights see no difference.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..decision import Decision
from ..eligibility import log_once
from ..projection import EngineProjection
from .hooks import LOGGER
from .stage import decide

Place = tuple[Any, str]  # a module, and the name of one of its own


class NormedLinear:
    """Takes the place of three modules' forward: both norms, in the order of the cat, and the linear layer."""

    def __init__(self, name: str, norms: tuple[Place, Place], linear: Place, norm_offset: float = 0.0) -> None:
        self.name, self.places = name, (*norms, linear)
        self.modules: tuple[Any, ...] = tuple(getattr(owner, attribute) for owner, attribute in self.places)
        self.forwards = tuple(module.forward for module in self.modules)
        self.projection = EngineProjection(self.modules[2], 2, chunk_norms=self.modules[:2], norm_offset=norm_offset)
        # SGLang's own layers return a bias that was not added beside the result; nn.Linear does not.
        self.returns_bias = type(self.modules[2]) is not nn.Linear
        self.aside: dict[int, Tensor] = {}

    def put_in_where_faster(self) -> None:
        """Decide, log it, and put it in where the op runs at any row count."""
        self.projection, self.decision = decide(self.name, self.projection, self._engine)
        if self.decision.never:
            return
        for k, module in enumerate(self.modules):
            module.forward = self._project if k == 2 else self._norm(k)

    def _engine(self, packed: Tensor) -> Tensor:
        """SGLang's own stage on [N, 2*H]."""
        projected = self._own(packed.chunk(2, -1))
        return projected[0] if self.returns_bias else projected

    def _own(self, chunks: Sequence[Tensor]) -> Any:
        *norms, linear = self.forwards
        return linear(torch.cat([norm(chunk) for norm, chunk in zip(norms, chunks, strict=True)], -1))

    def _norm(self, k: int) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: object, **kwargs: object) -> Tensor:
            if k in self.aside:  # of a forward that did not come to its end
                self.aside = {}
            # Both norms of a forward have the same rows: they decide alike.
            if args or kwargs or not self._takes(x.shape[0]):
                return self.forwards[k](x, *args, **kwargs)
            self.aside[k] = x
            return x[:, :0]

        return forward

    def _takes(self, rows: int) -> bool:
        # A module wrapped since (LoRA) would see views without columns.
        whole = all(
            getattr(owner, attribute) is module
            for (owner, attribute), module in zip(self.places, self.modules, strict=True)
        )
        return whole and self.decision.runs_op(rows)

    def _project(self, x: Tensor) -> Any:
        chunks, self.aside = self.aside, {}
        if len(chunks) != 2:  # an idle batch comes without norms
            return self.forwards[2](x)
        try:
            projected = self.projection([chunks[0], chunks[1]])
            return (projected, None) if self.returns_bias else projected
        except Exception as failure:
            self.decision = Decision()
            attribute = self.places[2][1]
            message = f"{attribute} stays with SGLang, {self.projection.op} failed: {failure!r}"
            log_once(LOGGER, logging.WARNING, message)
            return self._own([chunks[0], chunks[1]])
