"""What a corruption is drawn for, and what it is: the two words in which cases (`corruption_cases`, `corruption_loading`) are told.

Not covered: what becomes of one (`corruption_engines`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Pairs = Iterator[tuple[str, torch.Tensor]]

#: Parts of one parameter of the engine's: fused projections, and experts'.
_FUSED = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))
_EXPERT = ".mlp.experts."


@dataclass
class Site:
    """What a corruption is drawn for.

    Attributes:
        held, target: the tensors of the checkpoint that the engine holds, and those that the update brings.
        chance: what it is drawn with.
        model: the live model.
        others: live parameters as an engine that holds `held` has them.
    """

    held: Tensors
    target: Tensors
    chance: random.Random
    model: Any
    others: Tensors = field(default_factory=dict)

    def pick(self, names: list[str]) -> str:
        return self.chance.choice(sorted(names))

    def alike(self, name: str, among: list[str]) -> str | None:
        """Another tensor of the same shape and dtype; None where there is none."""
        like = self.target[name]
        found = [n for n in among if n != name and self.target[n].shape == like.shape and self.target[n].dtype == like.dtype]
        return self.pick(found) if found else None

    def pair(self) -> tuple[str, str] | None:
        """Two of `halves` that may stand for each other; None where there are none."""
        name = self.pick(self.halves)
        other = self.alike(name, self.halves)
        return None if other is None else (name, other)

    @property
    def halves(self) -> list[str]:
        """Tensors that are a part of a parameter: of experts where there are any, else of fused projections."""
        experts = [name for name in self.target if _EXPERT in name]
        return experts or [name for name in self.target if name.endswith(_FUSED)]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """Live parameters whose memory Python sees, of more than one element."""
        return {name: p for name, p in self.model.named_parameters() if p.numel() > 1 and p.layout == torch.strided}


@dataclass
class Made:
    """One corruption.

    Attributes:
        names: of what is corrupted, tensors or parameters; a report that has one of them has named it.
        offered: what the trainer offers; the target when None.
        arrives: what comes over the wire in its place; the same when None.
        everywhere: all engines of a fleet get it.
        values: the trainer itself gives other values under right names, shapes and dtypes.
        before: done to the live model before the update.
        stream: changes what the model's own `load_weights` is given.
        loading: active while the engine loads.
        loaded: done to the live model when all is loaded, before anything looks at it.
        blind: nothing that would repair storage does so.
        late: done to the live model behind the commit.
    """

    names: tuple[str, ...]
    offered: Tensors | None = None
    arrives: Tensors | None = None
    everywhere: bool = False
    values: bool = False
    before: Callable[[], None] | None = None
    stream: Callable[[Pairs], Pairs] | None = None
    loading: Callable[[], AbstractContextManager[Any]] = nullcontext
    loaded: Callable[[], None] | None = None
    blind: bool = False
    late: Callable[[], None] | None = None


Case = Callable[[Site], Made | None]
