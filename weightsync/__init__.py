"""weightsync: RL trainers change weights every step; a fleet of vLLM engines follows in place.

    trainer process        API process       controller (Ray actor)     engine actor (Ray)    vLLM worker process
    weightsync.client      weightsync.api    weightsync.fleet           weightsync.fleet      weightsync.worker
    ────────────────       ──────────────    ──────────────────────     ──────────────────    ───────────────────
    source → manifest HTTP▶ ───────────────▶ admit: ledger, versions ─▶ begin ──────────RPC─▶ load map says yes/no
                      ◀──── communicator: address, ranks ◀───────────────────────────────────┘
    bucket plan → broadcast ═══════════════ gloo / NCCL ════════════════════════════════════▶ thread: receive → stage, digest
    commit            HTTP▶ ───────────────▶ all staged? ─────────────▶ pause → apply ──RPC─▶ apply → verify
                                             collect verdicts ◀───────── verdict ◀───────────┘
                      ◀──── SyncReport ◀──── commit or quarantine ────▶ caches, version, resume

A folder is a process; their order is the way of the data. `protocol` holds what
crosses between them, `errors` every error, `config` every setting of the service.
`check` starts one engine by itself and finds out whether it follows its weights.

    from weightsync import WeightSync
    with WeightSync("http://127.0.0.1:8517", token=token) as sync:
        report = sync.sync_weights(model)

Importing this package loads neither torch nor Ray nor vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import WeightSyncError
from weightsync.protocol import EngineVerdict
from weightsync.results import Attachment, Generation, SyncReport

if TYPE_CHECKING:
    from weightsync.client import Published, WeightSync

__version__ = "0.1.0"
__all__ = ["Attachment", "EngineVerdict", "Generation", "Published", "SyncReport", "WeightSync", "WeightSyncError"]


def __getattr__(name: str) -> Any:
    # The client needs torch; the command line and the API should start without it.
    if name in ("WeightSync", "Published"):
        from weightsync import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
