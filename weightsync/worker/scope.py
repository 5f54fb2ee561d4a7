"""What a partial update is about: tensors of the engine's checkpoint whose names match a pattern, whole layers only.

A layer here is a module of the engine's model that owns parameters (`qkv_proj`, not a decoder
layer). A reload makes it anew, so that what nothing arrives for would start as in a fresh
one: a scope has all tensors of a layer, or none (all of q, k and v; all experts of a block).
An output head that is the embedding is in a scope with it, or neither is.

Values that a first run of the model caches are computed anew for all of it, from the weights
as they are: nobody can tell which of them such a value comes from.

Not covered: a draft model beside the target, which no update reaches, and adapters, which travel alone otherwise (`adapter`). A
draft layer or a merged adapter is a scope like others where the target's own loaders load it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from weightsync.errors import ManifestRefused
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.regions import Region

_HINT = (
    "Patterns go by the names of the engine's checkpoint. A draft model beside the target and adapters that are not merged "
    "are no scopes: merge an adapter and name the layers that it adapts"
)


class Scope:
    """The tensors that an update brings.

    Args:
        patterns: of names of the engine's checkpoint.
        base: the checkpoint's map.
        heads: output heads that the loaders pass over, each with what it must be a copy of (`admission.tied_heads`).
        alone: the engine has no other worker, which may load what this one's loaders pass over.

    Raises:
        ManifestRefused: a pattern matches nothing, or nothing that is loaded; or it has one of two that are tied.
    """

    def __init__(self, patterns: Sequence[str], base: LoadMap, heads: Mapping[str, Sequence[str]], alone: bool) -> None:
        self._base = base
        names: set[str] = set()
        for pattern in patterns:
            if not (found := fnmatch.filter(base.specs, pattern)):
                raise ManifestRefused(
                    f"scope: {pattern!r} matches no tensor of the engine's checkpoint, such as {_first(base.specs)!r}", hint=_HINT
                )
            if alone and not any(name in base.writes or heads.get(name) for name in found):
                raise ManifestRefused(
                    f"scope: of what {pattern!r} matches nothing is loaded (the model's loaders pass over {found[0]!r})",
                    names=found,
                    hint=_HINT,
                )
            names.update(found)
        self.names = frozenset(names)
        for head, sources in heads.items():
            shared = [source for source in sources if any(place[0] in base.aliases for place in base.writes[source])]
            together = [head, *(shared or sources)]
            if 0 < len(self.names.intersection(together)) < len(together):
                raise ManifestRefused(
                    f"scope: {head!r} is the embedding ({', '.join(together[1:])}), and the scope has one of the two",
                    names=together,
                    hint="Name both, or neither",
                )

    @property
    def whole(self) -> bool:
        """Whether it is all of the checkpoint."""
        return len(self.names) == len(self._base.specs)

    def outside(self, offered: Iterable[str]) -> list[str]:
        """Tensors of the checkpoint that were offered and are not in the scope."""
        return [name for name in offered if name in self._base.specs and name not in self.names]

    def torn(self, writes: Mapping[str, Sequence[Region]]) -> dict[str, str]:
        """Tensors outside of the scope whose layers the offered ones would fill, each with one of those."""
        sent = {layer_of(place): name for name, places in writes.items() for place in places}
        layers = {name: sorted({layer_of(place) for place in places} & sent.keys()) for name, places in self._base.writes.items()}
        return {name: sent[shared[0]] for name, shared in layers.items() if shared and name not in self.names}


def layer_of(place: Region) -> str:
    """The layer whose parameter a region is part of."""
    return place[0].rpartition(".")[0]


def _first(names: Iterable[str]) -> str:
    return next(iter(names), "")
