"""Whether a trainer's manifest is a complete set of weights for this engine, before a byte moves.

Names come first (`naming`): wrappers are taken off, and what can't be meant is
refused. Then the model's own loaders say where each tensor goes (`loadmap`), and
what they make of the manifest is compared, region by region, with what they make of
the checkpoint that the engine started from. So another layout of the same weights
(experts in one tensor, or one by one) is taken when the loaders fill the same places.
An update with a scope is judged within it (`scope`), and as strictly.

Not covered: the order of parts inside a tensor (gate before up), which no shape shows;
layers whose values a model's own hook makes from other layers' weights, of which some are frozen.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence

import torch

from weightsync.errors import ConfigError, ManifestRefused
from weightsync.protocol import Manifest, TensorSpec
from weightsync.transport.digest import Digest
from weightsync.worker import naming, regions
from weightsync.worker.loadmap import LoadMap, record
from weightsync.worker.scope import Scope, layer_of

_SHOWN = 20
_HINT = "Send the tensors under the names, shapes and dtypes of the checkpoint that the engine was started from"


class Frozen:
    """Tensors that an update may leave out, as long as they are the checkpoint's.

    What was sent once must be sent always: an engine that restarts holds the checkpoint's again, and one in which such
    an update failed holds something between the two.

    Args:
        patterns: of names of the engine's checkpoint.
        base: the checkpoint's map.

    Raises:
        ConfigError: a pattern matches none.
    """

    def __init__(self, patterns: Sequence[str], base: LoadMap) -> None:
        found: set[str] = set()
        for pattern in patterns:
            if not (names := fnmatch.filter(base.specs, pattern)):
                raise ConfigError(
                    f"engine.frozen: {pattern!r} matches no tensor of the engine's checkpoint",
                    hint=f"Patterns go by its names, such as {next(iter(base.specs), '')!r}",
                )
            found.update(names)
        self._paths = {name: {place[0] for place in base.writes.get(name, ())} for name in sorted(found)}
        self.sent: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names that may be left out."""
        return frozenset(self._paths.keys() - self.sent)

    def written(self, update: LoadMap) -> None:
        """An update begins to write."""
        self.sent |= {name for name, paths in self._paths.items() if paths & update.filled().keys()}

    def beyond(self, update: LoadMap) -> list[str]:
        """What was written since the engine started and an update has not: it can't bring that back."""
        return [name for name in sorted(self.sent) if not self._paths[name] <= update.filled().keys()]


def admit(
    manifest: Manifest,
    base: LoadMap,
    make_twin: Callable[[], torch.nn.Module],
    tied: bool,
    frozen: Frozen | None = None,
    scope: Sequence[str] = (),
    alone: bool = True,
    last: LoadMap | None = None,
) -> LoadMap:
    """Decide whether a manifest is a complete set of weights for this engine, or of a scope of it.

    Args:
        manifest: what the trainer offers.
        base: the map of the checkpoint that the engine started from.
        make_twin: builds a meta twin; called only when the manifest differs from `base` and `last`.
        tied: the model's output head is its embedding, so a separate head may be sent (see `tied_heads`).
        frozen: what may be left out, layer by layer.
        scope: patterns of names that the update is about; everything when empty.
        alone: the engine has no other worker. Others may take what this one's loaders pass over: it is `unclaimed` then, and refused
            where all answers are known.
        last: the map of the manifest before this one.

    Returns:
        The map of this manifest.

    Raises:
        ManifestRefused: empty, unknown, missing, misshapen, wrong dtype, filled twice, outside of the scope, or not to be told;
            with the names.
    """
    if not manifest.tensors:
        raise ManifestRefused("the manifest is empty: no tensor was given", hint="Pass a model or (name, tensor) pairs")
    resolved = naming.resolve([spec.name for spec in manifest.tensors], base.specs)
    _require_meaning(resolved)
    specs = [dataclasses.replace(s, name=resolved.names[s.name]) if s.name in resolved.names else s for s in manifest.tensors]
    offered = {spec.name: spec for spec in specs}
    within = Scope(scope, base, tied_heads(base) if tied else {}, alone) if scope else None
    if offered == base.specs and (within is None or within.whole):
        return dataclasses.replace(base, names=resolved.names)
    comparison = _Comparison(offered, base, {name: raw for raw, name in resolved.names.items()}, frozen or Frozen((), base), within)
    comparison.require_known_as_they_are()
    if last is not None and last.specs == offered:
        found = dataclasses.replace(last)
    else:
        try:
            found = record(make_twin(), specs)
        except ManifestRefused as exc:
            raise comparison.refused_by_loader(exc) from exc
    found.names, found.part = resolved.names, within is not None
    comparison.require_same_places(found, tied, alone)
    return found


def tied_heads(found: LoadMap) -> dict[str, list[str]]:
    """Output heads that a tied model's loader passes over, each with the tensors that it must be a copy of one of.

    The name alone does not make one: a draft's own head (`mtp.lm_head.weight`) is a tensor like others.
    """

    def is_head(name: str) -> bool:
        return name == "lm_head.weight" or any(path == name or path.endswith(f".{name}") for path in found.aliases)

    heads = [spec for name, spec in found.specs.items() if name not in found.writes and name.endswith("lm_head.weight") and is_head(name)]
    taken = [spec for spec in found.specs.values() if spec.name in found.writes]
    sources = {head.name: [s.name for s in taken if (s.shape, s.dtype) == (head.shape, head.dtype)] for head in heads}
    return {head: names for head, names in sources.items() if names}


def other_heads(
    found: LoadMap, manifest: Manifest, heads: Mapping[str, Sequence[str]], digests: Mapping[int, Digest]
) -> ManifestRefused | None:
    """An output head that was sent beside the embedding it is tied to, with other values.

    Args:
        found, manifest: the update.
        heads: of `tied_heads`.
        digests: of the tensors that have arrived, by their index in the manifest.
    """
    index = {found.name(spec.name): number for number, spec in enumerate(manifest.tensors)} if heads else {}
    for head, sources in heads.items():
        if all(digests[index[head]] != digests[index[source]] for source in sources):
            return ManifestRefused(
                f"{head!r} has other values than the embedding, which is this model's output head too",
                hint="Leave it out, or start the engines from a checkpoint whose config.json does not tie the two",
                names=[head],
            )
    return None


def _require_meaning(resolved: naming.Resolved) -> None:
    """Refuse names of which it is known what they are, and that they can't be loaded."""
    if names := resolved.adapter:
        raise ManifestRefused(
            f"{len(names)} tensor(s) are parts of an adapter that was not merged into the weights, the first {names[0]!r}",
            hint="Merge the adapter first (in PEFT: model.merge_adapter()), and send the merged weights without its parts",
            names=names,
        )
    if names := resolved.untrained:
        raise ManifestRefused(
            f"{len(names)} tensor(s) are what a module was before it was trained as a whole: {', '.join(names[:_SHOWN])}",
            hint="Leave them out: the trained ones stand beside them, under modules_to_save",
            names=names,
        )
    if resolved.ambiguous:
        said = [f"{raw} may be {' or '.join(names)}" for raw, names in resolved.ambiguous.items()]
        raise _refusal({"ambiguous": said}, list(resolved.ambiguous), hint="Send these under the engine's own names")
    if resolved.collapsed:
        said = [f"{' and '.join(raw)} are both {name}" for name, raw in resolved.collapsed.items()]
        raise _refusal(
            {"sent twice": said},
            [name for raw in resolved.collapsed.values() for name in raw],
            hint="Send each tensor once, under one name",
        )


class _Comparison:
    """A manifest against the engine's checkpoint.

    Args:
        offered: the manifest, by the engine's names.
        base: the map of the engine's checkpoint.
        raw: the engine's name to the trainer's, where the two differ.
        frozen: what may be left out.
        scope: what it is about, if not everything.
    """

    def __init__(
        self, offered: dict[str, TensorSpec], base: LoadMap, raw: Mapping[str, str], frozen: Frozen, scope: Scope | None = None
    ) -> None:
        self._offered, self._base, self._raw, self._frozen, self._sent = offered, base, raw, frozen.names, frozen.sent
        self._scope, self._due = scope, base.specs.keys() if scope is None else scope.names
        self._unknown = [name for name in offered if name not in base.specs]
        self._absent = [name for name in base.specs if name in self._due and name not in offered and name not in self._frozen]

    def require_known_as_they_are(self) -> None:
        """Refuse names that the engine's own checkpoint has with another shape or dtype."""
        offered, known = self._offered, self._base.specs
        shape = [n for n, s in offered.items() if n in known and s.shape != known[n].shape]
        dtype = [n for n, s in offered.items() if n in known and s.dtype != known[n].dtype]
        if shape or dtype:
            raise self._refuse(
                {
                    "wrong shape": [f"{self._say(n)} is {list(offered[n].shape)}, want {list(known[n].shape)}" for n in shape],
                    "wrong dtype": [f"{self._say(n)} is {offered[n].dtype}, want {known[n].dtype}" for n in dtype],
                    "unknown": self._closest(self._unknown),
                },
                shape + dtype,
            )

    def refused_by_loader(self, error: ManifestRefused) -> ManifestRefused:
        """What to say when the model's loader stopped at a tensor: all that is known of the cause, and its own sentence."""
        name, said = error.names[0], error.message[:300]
        if name in self._base.specs:
            return self._refuse({}, [name], loader=said)
        # Names of another layout are unknown to the checkpoint and none the worse for it; here most, or all, are wrong.
        advice = naming.prefix_advice(self._unknown, self._base.specs)
        if advice or len(self._unknown) == len(self._offered):
            kinds = {"unknown": self._closest(self._unknown), "missing": self._absent}
            return self._refuse(kinds, self._unknown, advice=advice, loader=said)
        return self._refuse({"unknown": self._closest([name])}, [name], loader=said)

    def require_same_places(self, found: LoadMap, tied: bool, alone: bool) -> None:
        """Refuse what the loaders make of the manifest where it is not what they make of the engine's own checkpoint."""
        base = self._base
        heads = tied_heads(found) if tied else {}
        passed_over = [
            n for n in found.specs if n not in found.writes and not (n in base.specs and n not in base.writes) and not heads.get(n)
        ]
        # What the engine's own checkpoint leaves as it was made would keep this update's value in all later ones.
        new = {name: places for name, places in found.writes.items() if name not in base.specs}
        beside = regions.uncovered(new, (place for places in base.writes.values() for place in places))
        if not alone:
            found.unclaimed = dict(zip([self._raw.get(name, name) for name in passed_over], self._closest(passed_over), strict=True))
            passed_over = []
        unknown = passed_over + list(beside)
        due = {name: places for name, places in base.writes.items() if name in self._due or name in found.specs}
        lacking = regions.uncovered(due, (place for places in found.writes.values() for place in places))
        half = self._half_frozen(found, [name for name in lacking if name in self._frozen and name not in found.specs])
        missing = [name for name in lacking if name not in found.specs and name not in self._frozen]
        short = [f"{count} of {self._say(name)}'s elements" for name, count in lacking.items() if name in found.specs]
        twice = {name: first for name, first in found.twice.items() if not self._overlap_in_base(name, first)}
        dtype = [n for n, d in found.dtypes.items() if n not in base.specs and found.specs[n].dtype != d]
        square = [name for name in new if name not in beside and self._could_be_transposed(name, found)]
        outside = self._scope.outside(found.specs) if self._scope is not None else []
        torn = self._scope.torn(found.writes) if self._scope is not None and not outside else {}
        kinds = {
            "outside of the scope": [self._say(name) for name in outside],
            "outside of the scope, in layers that are in it with other tensors (a layer is loaded whole: name all of it or nothing)": [
                f"{name} (beside {self._say(other)})" for name, other in torn.items()
            ],
            "unknown": self._closest(unknown),
            "missing": [f"{name} (frozen, but sent before: send it always)" if name in self._sent else name for name in missing] + short,
            "filled twice": [f"{self._say(name)} fills what {self._say(first)} fills" for name, first in twice.items()],
            "wrong dtype": [f"{self._say(n)} is {found.specs[n].dtype}, want {found.dtypes[n]}" for n in dtype],
            "of a layer that is frozen in part (send all of it or nothing)": [f"{name} (beside {other})" for name, other in half.items()],
            "in another layout than the checkpoint's, and square, so that no shape shows which way round (send them one by one)": [
                f"{self._say(name)} {list(found.specs[name].shape)}" for name in square
            ],
        }
        if any(kinds.values()):
            advice = naming.prefix_advice(unknown, base.specs)
            names = outside + list(torn) + unknown + missing + [name for name in lacking if name in found.specs]
            raise self._refuse(kinds, names + list(twice) + dtype + list(half) + square, advice=advice)

    def _overlap_in_base(self, one: str, other: str) -> bool:
        """Whether these two fill the same elements when the engine's own checkpoint is loaded (an input scale that gate and up share)."""
        return bool(regions.overlaps({name: self._base.writes.get(name, ()) for name in (one, other)}))

    def _half_frozen(self, found: LoadMap, absent: Sequence[str]) -> dict[str, str]:
        """Tensors that were left out of layers which others are sent for, each with one of those.

        A reload makes such a layer anew: what nothing arrives for starts as in a fresh one.
        """
        sent = {layer_of(place): self._say(name) for name, places in found.writes.items() for place in places}
        layers = {name: sorted({layer_of(place) for place in self._base.writes[name]} & sent.keys()) for name in absent}
        return {name: sent[shared[0]] for name, shared in layers.items() if shared}

    def _could_be_transposed(self, name: str, found: LoadMap) -> bool:
        """Whether a stacked tensor of another layout than the checkpoint's looks the same either way round."""
        shape = found.specs[name].shape
        if len(shape) < 3 or shape[-1] != shape[-2] or shape[-1] == 1:
            return False
        places = set(found.writes[name])
        return not any(spec.shape == shape and set(self._base.writes.get(other, ())) == places for other, spec in self._base.specs.items())

    def _say(self, name: str) -> str:
        """A tensor's name for a message: the trainer's, and how it was read."""
        return f"{raw} (read as {name})" if (raw := self._raw.get(name)) else name

    def _closest(self, names: Sequence[str]) -> list[str]:
        """Each name with the one of the engine's checkpoint that is most like it; only for those that are shown."""
        pairs = zip(names, naming.closest(names[:_SHOWN], self._base.specs), strict=False)
        return [f"{self._say(name)} (closest: {close})" if close else self._say(name) for name, close in pairs] + list(names[_SHOWN:])

    def _refuse(self, kinds: Mapping[str, Sequence[str]], names: Sequence[str], *, advice: str = "", loader: str = "") -> ManifestRefused:
        return _refusal(kinds, [self._raw.get(name, name) for name in names], advice=advice, loader=loader)


def _refusal(
    kinds: Mapping[str, Sequence[str]], names: Sequence[str], *, advice: str = "", loader: str = "", hint: str = _HINT
) -> ManifestRefused:
    parts = [advice] if advice else []
    for kind, entries in kinds.items():
        if entries:
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            parts.append(f"{len(entries)} {kind}: {', '.join(entries[:_SHOWN])}{more}")
    if loader:
        parts.append(loader)
    return ManifestRefused("; ".join(parts), hint=hint, names=names)
