"""The memory that captured graphs read: named, held, repaired, proved.

A captured graph replays from the addresses it was captured with. A reload that
leaves a value at a new address leaves the graph reading the old one. These
modules keep every captured address alive, bring new values to it, and say what
they could not prove. They know no transport, no Ray, no vLLM and no CUDA.

Reading order:

    contract.py     slots, the sealed contract, and the verdict: plain Python, no torch
    fields.py       what one Python object holds, read without running its code
    owners.py       walk: every tensor reachable from an object, by path
    sweep.py        tensors that no walk finds: module globals, and the anonymous
    pins.py         strong references to storages; slots and places out of a walk
    lookup.py       sealed paths looked up again without a walk, for the check after each update
    adopt.py        repair: new values into the old storage, the new tensors onto it
    selftest.py     poison what an update has written, and see what comes back
    blocks.py       the allocator's blocks, and which of them were there when loading ended
    graph_nodes.py  words in the parameters of a CUDA graph's nodes
    census.py       those of all graphs alive, joined with the allocator's blocks

As a worker drives them:

    found = sweep({"model": model})              # once, after capture
    pins = pin(found.everything, found.anonymous)
    contract = Contract.seal(slots_of(pins, reads), found.everything.scalars)
    lookup = Lookup(found.everything, contract.places, contract.scalars)
    adopter = Adopter(pins)
    ...                                          # each reload, after post-processing
    repair = adopter.adopt(rewalk({"model": model}, found.globals))
    now = lookup.find({"model": model})          # and the globals, by name
    verdict = compare(contract, lookup.places(now), scalars=lookup.numbers(now), repaired=repair.adopted)
    good = repair.ok and verdict.ok and not pins.broken()

`reads` are the addresses of a census; None, on a CPU, takes every storage that the
walk found for one that is read.

Not covered: memory that only C++ or a numpy array holds, and, save for the self-test,
values: that a storage is where it was says nothing about what is in it.
"""
