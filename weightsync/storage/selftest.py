"""Do captured slots follow their weights? Poison what an update has written, send other weights, and see what came back.

    test = SelfTest(contract.slots, pins)
    test.remember()                # the engine holds weights A
    ...                            # an update to A again
    assert not test.changed()      # an identity update leaves every bit
    ...                            # an update to B
    written = test.changed()       # what follows the weights
    test.poison(written)
    ...                            # an update to A
    stale = test.unrefreshed()     # what does not hold A's bytes again
    test.restore()

Poison is a one in every bit, NaN in each float format. A slot is only poisoned when
the update to B has written it: a lock, a workspace, a cache or a constant never is,
since a lock with anything but zero in it can hang a GPU. The engine must not run
between `remember` and `restore`: what a step writes would count as an update's.

Not covered: a derived value that no update writes keeps A's bytes under B's weights,
and so isn't among `changed`: compare with an engine that was started on B. Values
that A and B have in common; slots without an owner (`left_out`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weightsync.storage.contract import Fault, Kind, Slot, What
from weightsync.storage.pins import Pin, Pins, bits, fill_with_ones, same_bytes

#: Kinds that hold nothing which an update brings.
_LEFT_ALONE = (Kind.SCRATCH, Kind.ENGINE, Kind.ANONYMOUS)


class SelfTest:
    """One run over an engine's slots; keeps their bytes in host memory meanwhile.

    Args:
        slots: of the contract; the caller leaves out what it knows to be a cache.
        pins: what is held for it.

    Attributes:
        left_out: slots that are not looked at, and why.
    """

    def __init__(self, slots: Iterable[Slot], pins: Pins) -> None:
        self.left_out: dict[str, str] = {}
        self._slots: dict[str, Slot] = {}
        self._pins: dict[str, Pin] = {}
        for slot in slots:
            held = next((pins.by_path[path] for path in slot.paths if path in pins.by_path), None)
            if slot.kind in _LEFT_ALONE:
                self.left_out[slot.name] = str(slot.kind)
            elif held is None or not held.address:
                self.left_out[slot.name] = "has no memory of its own that is held"
            else:
                self._slots[slot.name], self._pins[slot.name] = slot, held
        self._remembered: dict[str, torch.Tensor] = {}
        self._poisoned: tuple[str, ...] = ()

    def remember(self) -> int:
        """Copy every slot to host memory; how many."""
        self._remembered = {name: _host(held) for name, held in self._pins.items()}
        self._poisoned = ()
        return len(self._remembered)

    def changed(self) -> list[str]:
        """Slots whose bytes are not the remembered ones."""
        return [
            name for name, old in self._remembered.items() if not self._pins[name].intact or not same_bytes(old, _host(self._pins[name]))
        ]

    def poison(self, names: Iterable[str]) -> int:
        """Fill slots with ones; how many bytes.

        Raises:
            ValueError: one of them was not remembered, or holds what was remembered: nothing shows that updates write it.
        """
        wanted, changed = tuple(names), set(self.changed())
        if wrong := [name for name in wanted if name not in changed]:
            raise ValueError(f"no update has written {', '.join(wrong[:20])}: it may be a lock or a constant")
        self._poisoned = wanted
        for name in wanted:
            fill_with_ones(self._pins[name].view())
        return sum(self._remembered[name].nbytes for name in wanted)

    def unrefreshed(self) -> list[Fault]:
        """Slots that do not hold the remembered bytes again."""
        return [self._fault(name) for name in self.changed()]

    def restore(self) -> int:
        """Write the remembered bytes back where others are; how many slots."""
        names = [name for name in self.changed() if self._pins[name].intact]
        with torch.inference_mode(False), torch.no_grad():
            for name in names:
                # As integers: a copy of floats may turn one NaN into another.
                bits(self._pins[name].view()).copy_(bits(self._remembered[name]))
        return len(names)

    def _fault(self, name: str) -> Fault:
        slot, held = self._slots[name], self._pins[name]
        if not held.intact:
            said = "its memory is gone"
        elif name in self._poisoned:
            poison = torch.empty_like(self._remembered[name])
            fill_with_ones(poison)
            said = "nothing wrote it" if same_bytes(poison, _host(held)) else "it was written, with other bytes"
        else:
            said = "it was not poisoned and has other bytes"
        return Fault(What.UNREFRESHED, name, slot.kernel, self._remembered[name].nbytes, said)


def _host(held: Pin) -> torch.Tensor:
    """A dense copy of a slot's bytes, in host memory."""
    with torch.inference_mode(False), torch.no_grad():
        view = bits(held.view())
        return torch.empty(view.shape, dtype=view.dtype).copy_(view)
