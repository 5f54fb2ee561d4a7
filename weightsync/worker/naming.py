"""A trainer's names and an engine's: wrappers taken off, adapters told apart, a prefix that differs found.

Training wraps modules, and each wrapper leaves a segment in the names below it. The
engine's checkpoint is the authority: a name that it has is taken as it is, whatever
it looks like, and another is mapped when taking wrappers off leads to exactly one.

Plain Python, no torch.

Not covered: names that a library changes otherwise than by such segments (flattened
parameters, other spellings of a projection): the model's loaders take them or not.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: Segments that a wrapper adds: DDP, FSDP, torch.compile, activation checkpointing, PEFT around a layer that it adapts.
WRAPPERS = frozenset({"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "base_layer"})
#: PEFT's two around the whole model.
_PEFT = ("base_model", "model")
#: PEFT's copy of a module that is trained as a whole, followed by the adapter's name; and what it was copied from.
_TRAINED, _UNTRAINED = "modules_to_save", "original_module"
_ADAPTER = "lora_"
#: vLLM's number of the one adapter that an engine has, and what stands for its path.
ADAPTER_NUMBER, ADAPTER_PATH = 1 << 20, "weightsync"
#: What a worker counts when it is asked what it is, where it has a slot for that.
TAKES = "takes_adapter"
#: The two halves of an adapted layer, as the last segments of their names.
HALVES = ("lora_A.weight", "lora_B.weight")
#: An ending that more of the engine's names share says nothing about a prefix.
_ALIKE = 8
_NUMBER = re.compile(r"\d+")


@dataclass
class Resolved:
    """What became of a manifest's names.

    Attributes:
        names: raw name to the engine's, where the two differ.
        collapsed: the engine's name to the raw ones, where several lead to it.
        ambiguous: raw name to the engine's names that it may mean.
        adapter: parts of an adapter that was not merged.
        untrained: what a module was before it was trained as a whole.
    """

    names: dict[str, str] = field(default_factory=dict)
    collapsed: dict[str, list[str]] = field(default_factory=dict)
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    adapter: list[str] = field(default_factory=list)
    untrained: list[str] = field(default_factory=list)


def canonical(name: str) -> str:
    """The name without wrappers. Its last segment, the tensor's own, always stays."""
    *path, own = name.split(".")
    kept: list[str] = []
    segments = iter(path)
    for segment in segments:
        if segment == _TRAINED:
            next(segments, None)  # the adapter's name
        elif (*kept[-1:], segment) == _PEFT:
            kept.pop()
        elif segment not in WRAPPERS:
            kept.append(segment)
    return ".".join((*kept, own))


def adapted(name: str) -> tuple[str, str]:
    """The layer that a part of an adapter belongs to, without wrappers, and which half it is; an empty half for any other part."""
    path, half = (".".join(part) for part in (name.split(".")[:-2], name.split(".")[-2:]))
    return (canonical(f"{path}.weight").removesuffix(".weight"), half) if half in HALVES else (name, "")


def resolve(offered: Iterable[str], known: Collection[str]) -> Resolved:
    """Find what each name means to the engine.

    Args:
        offered: the trainer's names.
        known: names in the engine's checkpoint; a mapping or a set.
    """
    offered, found = list(offered), Resolved()
    if unknown := [name for name in offered if name not in known]:
        index: dict[str, list[str]] = {}
        for name in known:
            index.setdefault(canonical(name), []).append(name)
        for name in unknown:
            _resolve_one(name, index, found)
    raw: dict[str, list[str]] = {}
    for name in offered:
        raw.setdefault(found.names.get(name, name), []).append(name)
    found.collapsed = {name: names for name, names in raw.items() if len(names) > 1}
    return found


def _resolve_one(name: str, index: Mapping[str, Sequence[str]], found: Resolved) -> None:
    segments, plain = name.split("."), canonical(name)
    # The engine's own names may have such a segment too: then just the others are taken off.
    meant = [known for known in index.get(plain, ()) if _within(known.split("."), segments)]
    if len(meant) > 1:
        found.ambiguous[name] = meant
    elif meant:
        found.names[name] = meant[0]
    elif any(segment.startswith(_ADAPTER) for segment in segments):
        found.adapter.append(name)
    elif _UNTRAINED in segments:
        found.untrained.append(name)
    elif plain != name:
        # Plain or wrapped, the checkpoint has no such name. The loaders may take it, and they know no wrappers.
        found.names[name] = plain


def _within(part: Sequence[str], whole: Iterable[str]) -> bool:
    """Whether a name is another with segments left out."""
    rest = iter(whole)
    return all(segment in rest for segment in part)


def prefix_advice(unknown: Sequence[str], known: Iterable[str]) -> str:
    """One sentence about the prefix that most of the unknown names lack, have too much, or have instead of another; else empty.

    Args:
        unknown: names that the engine does not know.
        known: names in the engine's checkpoint.
    """
    ends: dict[str, list[str]] = {}
    for name in known:
        for head, tail in _splits(name):
            ends.setdefault(tail, []).append(head)
    votes: Counter[tuple[str, str]] = Counter()
    example: dict[tuple[str, str], str] = {}
    for name in unknown:
        for head, tail in _splits(name):
            if tail in ends:
                pairs = {(head, other) for other in ends[tail]} if len(ends[tail]) <= _ALIKE else set()
                votes.update(pairs)
                for pair in pairs:
                    example.setdefault(pair, f"{name!r} against {pair[1] + tail!r}")
                break
    if not votes:
        return ""
    (have, want), count = votes.most_common(1)[0]
    if count < 2 or 2 * count <= len(unknown):
        return ""
    if not have:
        what = f"lack the prefix {want!r}"
    elif not want:
        what = f"have the prefix {have!r}, which the engine's checkpoint has not"
    else:
        what = f"have the prefix {have!r} where the engine's checkpoint has {want!r}"
    return f"{count} of {len(unknown)} unknown names {what}: {example[have, want]}"


def closest(names: Iterable[str], known: Iterable[str]) -> list[str | None]:
    """For each name the known one that is most like it: that shares most segments at both ends, and among those by its letters."""
    split = [(name, name.split(".")) for name in known]
    found: list[str | None] = []
    for name in names:
        segments, best, alike = name.split("."), 0, dict[str, str]()
        for other, others in split:
            score = _shared(segments, others) + _shared(segments[::-1], others[::-1])
            if score > best:
                best, alike = score, {}
            if score == best:
                alike.setdefault(_NUMBER.sub("#", other), other)  # one for all layers and experts: comparing letters is slow
        found.append(next(iter(difflib.get_close_matches(name, alike.values(), n=1, cutoff=0.6)), None))
    return found


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    """How many segments two names begin with alike."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _splits(name: str) -> list[tuple[str, str]]:
    """(head, tail) at every dot, the longest tail first; tails of one segment say nothing."""
    segments = name.split(".")
    cuts = range(max(len(segments) - 1, 1))
    return [("".join(f"{segment}." for segment in segments[:cut]), ".".join(segments[cut:])) for cut in cuts]
