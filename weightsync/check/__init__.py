"""Does an engine follow its weights? One engine in this process, updated as a trainer would, looked at from inside.

    environment.py  variables for a process that hosts one engine
    engine.py       a trainer in a thread beside the engine; greedy outputs
    contents.py     digests and addresses of everything that a model holds
    inputs.py       the checkpoints of a check, looked at before an engine is started
    probe.py        one engine of a check, in a process of its own: contract, identity, proof
    run.py          a check from start to end
    show.py         its report on a terminal

Not covered: engines of a running fleet; several workers in one engine.
"""
