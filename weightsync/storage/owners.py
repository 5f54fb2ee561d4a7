"""Who owns which tensor: every tensor that can be reached from an object, by path.

A storage that a graph reads is repaired through the path to its owner, and paths
must mean the same before and after a reload that rebuilt half of the objects on the
way. So what modules have registered comes first, then everything else in breadth,
and an object that is reached twice is walked once: its other paths are kept as
*aliases*, through which `Walk.resolve` and a repair find it again when what used to
be one object has become two, or the reverse.

    model.layers.0.mlp.experts.quant_method.moe_kernel.fused_experts.ab_strides1
    model.layers.0.mlp._fn.<closure w>      a cell of a function
    model.layers.0.apply.<keyword scale>    a functools.partial
    model.cache['w'][3]                     containers

Not covered: what `fields` leaves out; objects deeper than `MAX_DEPTH` or beyond
`MAX_OBJECTS` (named in `Walk.truncated`); floats that pair with no tensor's name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from weightsync.storage import fields

#: Steps from the nearest registered module; what is known to matter lies within ten.
MAX_DEPTH = 32
#: Objects that one walk looks into. A model of 48 layers with 128 experts each has about 60,000.
MAX_OBJECTS = 1_000_000
#: `x_float` and `x_host` are taken for host copies of a tensor `x` or `_x` on the same object.
HOST_SUFFIXES = ("_float", "_host")
#: Most of these are empty tables of hooks; asking them runs nobody's code.
_BUILTIN_CONTAINERS = frozenset({dict, list, tuple, OrderedDict})


@dataclass
class Walk:
    """What a walk found.

    Args:
        tensors: path to tensor, canonical paths first; a tensor is here once for each of its paths.
        registered: paths under which a module has it as a parameter or buffer.
        aliases: another path to an object, and the path under which its content is listed.
        scalars: path to host number.
        truncated: where the walk stopped at a limit. Not empty means that tensors may be missing.
        roots: names of what was walked.
        parents: path to the path of what holds it, all the way from the tensors and numbers to the roots, whose parent is empty.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    truncated: list[str] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)

    def resolve(self, path: str) -> torch.Tensor | None:
        """The tensor at a path, by whatever alias; None when there is none."""
        found = self.tensors.get(path)
        if found is None and self.aliases:
            for other in translations(path, self.aliases):
                if (found := self.tensors.get(other)) is not None:
                    break
        return found

    def covers(self, path: str) -> bool:
        """Whether a path lies at or below one of the roots."""
        return any(path.startswith(root) and path[len(root) : len(root) + 1] in ("", ".", "[") for root in self.roots)


def walk(root: object, name: str, *, also: Collection[str] = ()) -> Walk:
    """Every tensor reachable from one object. Runs none of the object's code, and changes nothing.

    Args:
        root: usually a module.
        name: what paths start with.
        also: names of attributes whose numbers are recorded though no tensor pairs with them.
    """
    return rewalk({name: root}, also=also)


def rewalk(roots: Mapping[str, object], globals_: Iterable[str] = (), *, also: Collection[str] = ()) -> Walk:
    """`walk` for several objects at once, and for globals that a sweep has found.

    Args:
        roots: name to object.
        globals_: `module:NAME`; one that is gone is skipped, so that its paths turn out lost.
        also: as in `walk`.
    """
    walker = Walker(also)
    for name, root in roots.items():
        walker.add(root, name)
    for name in globals_:
        walker.add_global(name)
    return walker.finish()


def scalars(root: object, name: str, *, also: Collection[str] = ()) -> dict[str, float]:
    """Host numbers beside device tensors (`_k_scale_float` beside `_k_scale`), by path.

    A kernel that takes such a number by value has it baked into a captured graph.
    """
    return walk(root, name, also=also).scalars


class Walker:
    """One walk under way; holds every object it has seen, so that no id is used twice, until `finish`."""

    def __init__(self, also: Collection[str] = (), max_objects: int = MAX_OBJECTS, max_depth: int = MAX_DEPTH) -> None:
        self.found = Walk()
        self._also = frozenset(also)
        self._max_objects, self._max_depth = max_objects, max_depth
        self._readers: dict[type, fields.Fields | None] = dict.fromkeys(fields.PLAIN)
        self._tensor_types: set[type] = set()
        self._sized: set[type] = set()
        self._seen: dict[int, str] = {}
        self._held: list[object] = []
        self._parents: dict[str, str] = {}
        self._queue: deque[tuple[Any, str, int]] = deque()

    def add(self, root: object, name: str) -> None:
        """Walk one more object; what earlier ones have reached is not walked again."""
        self.found.roots.append(name)
        if fields.is_module(root):
            self._modules(root, name)
        else:
            self._visit(root, name, "", 0)
        self._drain()

    def add_global(self, name: str) -> None:
        """Walk a global by `module:NAME` or `module:Class.NAME`; one that is gone counts as a root all the same."""
        values = list(resolve_global(name))
        if values:
            self.add(values[0], name)
        else:
            self.found.roots.append(name)

    def is_new(self, value: object) -> bool:
        """Whether `add` would look at this: a tensor, or an object that can hold something and was not reached yet."""
        reader = self._reader(type(value))
        return type(value) in self._tensor_types or (reader is not None and id(value) not in self._seen)

    def mark(self) -> tuple[int, int, int, int]:
        """Where the walk stands, for `since` and `undo`."""
        return len(self.found.tensors), len(self.found.aliases), len(self.found.scalars), len(self.found.truncated)

    def since(self, mark: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
        """Tensors found after the mark."""
        return dict(islice(reversed(self.found.tensors.items()), len(self.found.tensors) - mark[0]))

    def undo(self, mark: tuple[int, int, int, int]) -> None:
        """Forget the names found after the mark, and the root added then. What was reached stays reached."""
        for path in self.since(mark):
            self.found.registered.discard(path)
        tables: tuple[dict[str, Any], ...] = (self.found.tensors, self.found.aliases, self.found.scalars)
        for table, count in zip(tables, mark[:3], strict=True):
            while len(table) > count:
                table.popitem()
        del self.found.truncated[mark[3] :]
        self.found.roots.pop()

    def finish(self) -> Walk:
        """What was found; lets go of everything else."""
        aliases_of: dict[str, list[str]] = {}
        for path, to in self.found.aliases.items():
            aliases_of.setdefault(to, []).append(path)
        # Aliases matter where a tensor lies below, be it through another alias.
        useful: set[str] = set()
        leaves = (*self.found.tensors, *self.found.scalars)
        waiting = [self._parents[path] for path in leaves]
        while waiting:
            path = waiting.pop()
            if path not in useful:
                useful.add(path)
                waiting += [self._parents[other] for other in (path, *aliases_of.get(path, ())) if other in self._parents]
        self.found.aliases = {path: to for path, to in self.found.aliases.items() if to in useful}
        self.found.parents = {path: self._parents[path] for path in (*leaves, *useful) if path}
        self._held.clear()
        self._seen.clear()
        self._parents.clear()
        return self.found

    def _modules(self, root: Any, name: str) -> None:
        """First everything registered, so that registered paths are the canonical ones."""
        stack = [(root, name, "")]
        while stack:
            module, path, parent = stack.pop()
            if not self._enter(module, path, parent, 0):
                continue
            children = []
            for table, key, value in fields.module_tables(module):
                if table == "_modules" and fields.is_module(value):
                    children.append((value, f"{path}.{key}", path))
                elif fields.is_tensor_type(type(value)):
                    self.found.registered.add(f"{path}.{key}")
                    self._visit(value, f"{path}.{key}", path, 0)
            stack += reversed(children)

    def _drain(self) -> None:
        while self._queue:
            value, path, depth = self._queue.popleft()
            fields_of = self._readers[type(value)]
            if fields_of is None or depth > self._max_depth or len(self._held) > self._max_objects:
                self.found.truncated.append(path)
                continue
            if type(value) in self._sized and fields.is_long(value):
                self.found.truncated.append(path)
            names: dict[str, Any] = {}
            for suffix, held in fields_of(value):
                kind = type(held)
                if kind is float or kind is int:
                    if suffix[1:] in self._also or suffix.rstrip("']").endswith(HOST_SUFFIXES):
                        names[suffix] = held
                elif kind in _BUILTIN_CONTAINERS and not held:
                    continue
                elif kind not in self._readers or self._readers[kind] is not None or kind in self._tensor_types:
                    self._visit(held, path + suffix, path, depth)
            if names:
                self._pair(path, names)

    def _pair(self, path: str, numbers: dict[str, float]) -> None:
        """Keep the numbers that stand beside a tensor of the same name, and those asked for."""
        for suffix, value in numbers.items():
            opening = suffix[: 1 if suffix[0] == "." else 2]
            name = suffix[len(opening) :].rstrip("']")
            closing = suffix[len(opening) + len(name) :]
            base = next((name.removesuffix(end) for end in HOST_SUFFIXES if name.endswith(end)), name).lstrip("_")
            beside = (f"{path}{opening}{lead}{base}{closing}" for lead in ("", "_", "__"))
            if name in self._also or any(other in self.found.tensors for other in beside):
                self.found.scalars[path + suffix] = value
                self._parents[path + suffix] = path

    def _visit(self, value: Any, path: str, parent: str, depth: int) -> None:
        kind = type(value)
        reader = self._reader(kind)
        if kind in self._tensor_types:
            if path not in self.found.tensors:
                self.found.tensors[path] = value
                self._parents[path] = parent
            # Loaders, and sometimes scales, hang on tensors as attributes.
            if id(value) not in self._seen and reader is not None:
                self._enter(value, path, parent, depth)
        elif reader is not None:
            self._enter(value, path, parent, depth)

    def _reader(self, kind: type) -> fields.Fields | None:
        """How to read objects of a class, found out once."""
        if kind not in self._readers:
            self._readers[kind] = fields.reader(kind)
            if fields.is_tensor_type(kind):
                self._tensor_types.add(kind)
            if fields.is_sized_type(kind):
                self._sized.add(kind)
        return self._readers[kind]

    def _enter(self, value: Any, path: str, parent: str, depth: int) -> bool:
        """Queue an object the first time; later note the path as an alias. Whether it was the first time."""
        first = self._seen.setdefault(id(value), path)
        if first is not path:
            if first != path:
                self.found.aliases.setdefault(path, first)
                self._parents.setdefault(path, parent)
            return False
        # Holding the object keeps its id from being used again.
        self._held.append(value)
        self._parents.setdefault(path, parent)
        self._reader(type(value))
        self._queue.append((value, path, depth + 1))
        return True


def resolve_global(name: str) -> Iterator[object]:
    """The value of `module:NAME` or `module:Class.NAME`; yields nothing when it is gone."""
    module_name, _, attribute = name.partition(":")
    space: Any = getattr(sys.modules.get(module_name), "__dict__", {})
    *classes, last = attribute.split(".")
    for cls in classes:
        space = fields.class_dict(space.get(cls))
    if last in space:
        yield space[last]


def translations(path: str, aliases: Mapping[str, str]) -> Iterator[str]:
    """Other paths to what a path leads to: the aliases of its beginnings put in, longest first."""
    for _ in range(16):  # an alias may begin with another
        for cut in _cuts(path):
            if (to := aliases.get(path[:cut])) is not None:
                path = to + path[cut:]
                yield path
                break
        else:
            return


def _cuts(path: str) -> Iterator[int]:
    """Where a beginning of the path may end, from the back."""
    yield len(path)
    for index in range(len(path) - 1, 0, -1):
        if path[index] in ".[":
            yield index
