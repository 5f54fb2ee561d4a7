"""One update in one worker: admit, stage, apply, prove, or put back.

`apply` loads the staged tensors with vLLM's layerwise reload, under what a cold
load runs in, and checks that every tensor of the manifest was taken and that every
layer is complete; layers that an update like this one has shown not to need that are written by a
plan (`planned`). `verify`, once all workers have got so far, takes back what the
model's first run had cached and lets it run once, and has the guard bring back what
moved. Where numbers or layouts have changed that captured graphs hold, they are captured anew.
Then it checks that every registered parameter and buffer lies at the address, layout
and dtype it had at the start, and that the storage contract holds.

A reload that fails half way is put back structurally (no tensor left on meta, no
buffered tensor left over); its values are then a mixture, and `wrote` says so. The
staged bytes stay until the update has ended, so `apply` may be called again; and
where the last committed update was kept (`retain`), `rollback` brings that one back.
An update counts when the engine says so (`keep`): this worker may have proved what another
worker could not. A partial one builds on what was proved (`held`); behind it all of the
storage is proved as behind any. None is taken asleep (`sleep`).

Not covered: cached values that can't be taken back (`unrefreshable`, logged at the start).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightsync.errors import (
    Aborted,
    ApplyFailed,
    InternalError,
    UnsupportedEngine,
    UpdateConflict,
    WeightSyncError,
)
from weightsync.protocol import BeginOrder, TensorSpec, WorkerReport
from weightsync.storage.adopt import Adoption
from weightsync.transport.retained import folder_of
from weightsync.worker import admission, guard, joining, loading, loadmap, vllm_compat
from weightsync.worker.adapter import Adapters
from weightsync.worker.adapting import Adapting
from weightsync.worker.following import Following
from weightsync.worker.held import Held
from weightsync.worker.loadmap import LoadMap
from weightsync.worker.planned import Planner
from weightsync.worker.receiver import Receiver
from weightsync.worker.rereading import Rereading
from weightsync.worker.sleep import Sleep
from weightsync.worker.staging import Regions, Staged, Whole
from weightsync.worker.stored import Stored
from weightsync.worker.streaming import Streamed
from weightsync.worker.telling import Telling

logger = logging.getLogger(__name__)


class Applier(Telling, Following, Adapting):
    """State of one worker between RPCs.

    Args:
        model: the live model, after graphs were captured.
        runner: vLLM's model runner, whose buffers captured graphs read too.
        vllm_config: the engine's configuration.
        device: the worker's device.
        rank: of this worker, among all of its engine.

    Raises:
        UnsupportedEngine: a layer of this model has not been proved.
    """

    def __init__(self, model: torch.nn.Module, runner: Any, vllm_config: Any, device: torch.device, rank: int) -> None:
        if unproved := vllm_compat.unproved_layers(model):
            raise UnsupportedEngine(
                f"{len(unproved)} layer(s) would keep stale values after an update: {', '.join(unproved[:3])}",
                hint="Serve a model without them",
            )
        self.model, self.vllm_config, self.device, self.rank = model, vllm_config, device, rank
        self._adapters = Adapters()
        self._seal = loading.registered_places(model)
        self._runner, self._repaired = runner, Adoption()
        self._lazies = vllm_compat.find_lazies(model, runner)
        graphs, unproven = vllm_compat.captures_graphs(vllm_config), self._lazies.unrefreshable
        self._guard = guard.Guard(
            model, runner, device, graphs, strict=bool(vllm_compat.told(vllm_config).get("strict")), unproven=unproven
        )
        self._rereading = Rereading(model, self._guard, rank)
        self._planner = Planner(model, self._guard, vllm_config)
        for path in self._lazies.unrefreshable:
            logger.warning("%s was filled in after loading; if it derives from weights, it stays as it is in updates", path)
        self._tied = bool(getattr(vllm_config.model_config.hf_config, "tie_word_embeddings", False))
        self._folder = Path(str(vllm_config.model_config.model))
        twin, self._fresh = vllm_compat.draw(vllm_config)
        self._base = loadmap.record(twin, loadmap.checkpoint_specs(self._folder))
        self._frozen = admission.Frozen(vllm_compat.told(vllm_config).get("frozen", ()), self._base)
        if missing := vllm_compat.missing_layers(model, self._base.filled()):
            raise UnsupportedEngine(
                f"{len(missing)} layer(s) that a checkpoint is loaded into are gone from the live model: {', '.join(missing[:3])}",
                hint="Serve a model that keeps them",
            )
        self._map = self._base
        self._heads: dict[str, list[str]] = {}
        self._stored: Stored | None = None
        self._alone = vllm_config.parallel_config.world_size_across_dp == 1  # no other worker has a part of the model
        self._held, self._sleep, self._regions = Held(), Sleep(vllm_compat.SleepMemory()), Regions()
        self._back: Staged | None = None  # what is kept of the last update, while it is brought back
        self._receiver: Receiver | None = None
        self._joining = joining.Joining(device, rank)
        self._state = "none"
        self._error: WeightSyncError | None = None
        self._wrote = self._recaptured = self._released = self._untouched = False
        self._seconds: dict[str, float] = {}
        self._checks: dict[str, int] = {}

    @property
    def wrote(self) -> bool:
        """Whether live storage holds an update that was not proved."""
        return self._wrote

    def begin(self, order: BeginOrder) -> WorkerReport:
        """Admit an update and start receiving it. Beginning the same update again only reports."""
        current = self._receiver
        if current is not None and current.order.request.update_id == order.request.update_id:
            return self.report()
        if current is not None:
            # What no controller speaks of any more went with an earlier one; its staging would stand in the way.
            if self._state != "verified":
                self.abort(current.order.request.update_id)
            elif self._held.counts != current.order.brings:
                self._held.kept = None  # whether the engine holds that one or this one nobody has said
                self._adapters.settle()
            current.discard()
        self._sleep.require_awake()
        self._held.require_base(order)
        found, heads = self._admitted(order)
        connect, landing = self._joining.begin(order), joining.landing(order, self.device)
        self._held.stop()
        if (folder := folder_of(order, self.rank)) is not None:
            folder.tidy()
        unused = frozenset[int]() if folder else self._unused(found, order.request.manifest.tensors)
        receiver = Receiver(order, self.rank, self.device, landing, connect, self._loaded_as(found), unused, self._regions)
        self._map, self._heads, self._receiver = found, heads, receiver
        self._back = None
        self._state, self._error, self._seconds, self._checks = "receiving", None, {}, {}
        self._receiver.start()
        return self.report()

    def _unused(self, load_map: LoadMap, specs: Sequence[TensorSpec]) -> frozenset[int]:
        return frozenset() if self._alone else load_map.unused(spec.name for spec in specs)

    def report(self) -> WorkerReport:
        """Where the update stands; answers at once."""
        receiver = self._receiver
        if receiver is None:
            return WorkerReport(self.rank, "", "none", wrote=self._wrote, memory=self._memory())
        if self._state in ("receiving", "staged") and receiver.error is not None:
            self._state, self._error = "failed", receiver.error
        elif self._state == "receiving" and receiver.ready:
            self._error = admission.other_heads(self._map, receiver.order.request.manifest, self._heads, receiver.digests)
            self._state = "failed" if self._error else "staged"
        return WorkerReport(
            rank=self.rank,
            update_id=receiver.order.request.update_id,
            state=self._state,
            tensors=receiver.tensors,
            nbytes=receiver.nbytes,
            seconds={**receiver.seconds, **self._seconds},
            error=self._error.to_dict() if self._error else None,
            wrote=self._wrote,
            checks=dict(self._checks),
            unclaimed=self._map.unclaimed,
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, int]:
        into, kept = self._receiver.into if self._receiver else None, self._held.kept
        staging = into.nbytes if isinstance(into, Whole) else 0
        # Memory that a trainer was lent is the staging itself, or what is kept of the last one; a file is told as what it is kept for.
        return {"staging": max(staging, self._regions.nbytes), "rollback": kept.data.nbytes if kept and not kept.file else 0}

    def apply(self, update_id: str) -> WorkerReport:
        """Write the update into the live storage. The engine must be paused. A staged one may be applied again until it counts."""
        receiver = self._expect(update_id, "staged", "applied", "failed", "verified")
        streamed = receiver.order.stage == "none"
        again = "apply" in self._seconds  # else what failed is that it did not arrive, whatever an earlier update has written
        if (streamed and self._state != "staged") or (self._state == "failed" and not (again and self._wrote)):
            return self.report()
        began = time.monotonic()
        if self._state == "staged":
            self._held.require_base(receiver.order)
            self._sleep.require_awake()
            self._checks |= self._sleep.restore()
        if self._guard.outdated and not self._wrote:
            # Somebody captured since the seal, and what was captured is still where it was.
            self._guard.seal()
            self._lazies.note_captured()
        try:
            incoming = self._incoming(receiver)
            if isinstance(incoming, Streamed):
                incoming.wait()
            self._wrote, self._held.proved = True, ""
            self._frozen.written(self._map)
            self._error = self._load(incoming, "" if again else self._plan_key(receiver))
        except WeightSyncError as exc:
            self._error = WeightSyncError.from_dict(exc.to_dict())
        if streamed and self._error:
            receiver.drain()
        self._state = "failed" if self._error else "applied"
        self._seconds["apply"] = time.monotonic() - began
        return self.report()

    def _incoming(self, receiver: Receiver) -> Staged | Streamed:
        # A cold load passes over an output head that is the embedding; a reload would write it into the embedding.
        return receiver.held().update(self._map, self._heads.keys())

    def _plan_key(self, receiver: Receiver) -> str:
        order = receiver.order
        return receiver.plan.hash if order.plan and order.stage != "none" and not (order.request.scope or self._map.adapter) else ""

    def _load(self, incoming: Staged | Streamed, plan_key: str = "") -> WeightSyncError | None:
        """Write an update; what stands against it.

        Args:
            plan_key: of updates that are alike, which may be written by a plan (`planned`); none goes the general way.
        """
        counts: dict[str, int] = {"not_kept": len(incoming.unused)} if isinstance(incoming, Staged) else {}
        self._untouched = incoming.load_map.adapter_alone
        try:
            if self._untouched:
                self._repaired = Adoption()
                self._bring_adapter(incoming)
                return None
            left = self._write_planned(plan_key, incoming, counts) if plan_key and isinstance(incoming, Staged) else incoming
            if not self._untouched:
                loading.load(self.model, self.vllm_config, self._fresh, left, counts)
        except WeightSyncError as exc:
            return WeightSyncError.from_dict(exc.to_dict())  # without its traceback, whose frames hold the staged bytes
        finally:
            self._count(counts)
        return None

    def verify(self, update_id: str) -> WorkerReport:
        """Bring the rest after the loaded weights, and prove them. Asked for when every worker of the engine has loaded them."""
        receiver = self._expect(update_id, "applied")
        began = time.monotonic()
        incoming = self._back or self._incoming(receiver)
        self._error = self._proved(incoming)
        self._seconds["verify"] = time.monotonic() - began
        proved = "verified" if self._back is None else "rolled_back"
        self._state, self._wrote = ("failed", True) if self._error else (proved, False)
        if self._error:
            self._planner.forget()
        else:
            self._learn(self._planner.proved)
            self._held.proved = receiver.order.brings if self._back is None else self._held.counts
            self._sleep.forget()
        return self.report()

    def keep(self, update_id: str) -> WorkerReport:
        """The engine says that a verified update counts: its bytes are kept to come back to, or let go of."""
        receiver = self._expect(update_id, "verified")
        order = receiver.order
        self._adapters.settle()
        if receiver.into is not None:
            incoming = self._incoming(receiver)
            if isinstance(incoming, Staged):
                self._learn(lambda: self._planner.learn(incoming))
            keeps = order.retain or folder_of(order, self.rank) is not None
            kept = replace(incoming, digests=dict(receiver.digests)) if keeps and isinstance(incoming, Staged) else None
            self._held.settle(order, self.rank, kept)
            self._rereading.note(self._map, order.request.manifest, receiver.digests)
            receiver.discard()
        return self.report()

    def _learn(self, learn: Callable[[], None]) -> None:
        try:
            learn()
        except Exception:  # the update is proved: what could be quicker the next time is no fault of it
            logger.exception("no plan was made of an update, and the next one goes the general way")
            self._planner.forget()

    def _write_planned(self, plan_key: str, incoming: Staged, counts: dict[str, int]) -> Staged:
        """Write what is planned of an update; what is left to be loaded, which is all where nothing is planned."""
        planned = self._planner.find(plan_key)
        if planned is not None and planned.rest.writes and loading.registered_places(self.model) != self._seal:
            # Somebody has moved a parameter since: the repair would bring its old bytes over those that a plan has written.
            self._planner.forget()
            planned = None
        if planned is None:
            self._planner.watch(plan_key, incoming)
            return incoming
        try:
            left = planned.write(incoming)
        except Exception as exc:
            self._planner.forget()
            raise ApplyFailed(f"what was planned of the update could not be written: {type(exc).__name__}: {exc}") from exc
        self._untouched = not planned.rest.writes
        counts |= {"layers_planned": planned.layers, "tensors": len(incoming.manifest.tensors)}
        return left

    def rollback(self, update_id: str) -> WorkerReport:
        """Load the update that was committed last, after one that failed when a worker had written. The engine must be paused.

        As any update it is verified when every worker has loaded it.
        """
        receiver = self._expect(update_id, "staged", "applied", "failed", "verified")
        kept = self._incoming(receiver) if self._map.adapter_alone else self._held.kept
        if not isinstance(kept, Staged):
            raise InternalError("no earlier update is kept in this worker", update_id=update_id, hint="Set sync.rollback to host")
        if not kept.load_map.adapter_alone and (beyond := self._frozen.beyond(kept.load_map)):
            raise ApplyFailed(f"the update that is kept left out {', '.join(beyond[:20])}, which this one wrote", names=beyond)
        began = time.monotonic()
        receiver.discard()  # memory for what the load takes
        self._back, self._wrote, self._held.proved = kept, True, ""
        self._error = self._load(self._back)
        self._state = "failed" if self._error else "applied"
        self._seconds["rollback"] = time.monotonic() - began
        return self.report()

    def _proved(self, incoming: Staged | Streamed) -> WeightSyncError | None:
        """What else follows the weights follows; then what stands against them."""
        try:
            if not incoming.load_map.adapter_alone:
                self._follow()
                self._bring_adapter(incoming)  # also where none is: the one before goes, and a capture has emptied the slot
            error = self._prove() or self._adapter_wrong()
            if error is None and self._stored is not None and isinstance(incoming, Staged):
                error, counts = self._stored.check(incoming.load_map, incoming.stream([]))
                self._count(counts)
            return error
        except WeightSyncError as exc:
            return WeightSyncError.from_dict(exc.to_dict())
        except Exception as exc:
            return ApplyFailed(f"the weights are loaded, and what is made from them could not be: {type(exc).__name__}: {exc}")

    def abort(self, update_id: str) -> WorkerReport:
        """End an update, whatever its state; live storage is not touched."""
        receiver = self._receiver
        if receiver is not None and receiver.order.request.update_id == update_id:
            if self._state in ("receiving", "staged"):
                self._state, self._receiver = "none", None
                self._joining.end(receiver.order)
            if not receiver.draining:
                receiver.discard()
                if self._state != "verified" and (folder := folder_of(receiver.order, self.rank)):
                    folder.tidy()
            if not receiver.draining and self._state != "verified":  # the stream may stand in the middle of an update: meet anew
                self._joining.leave()
        return self.report()

    def fall_asleep(self, level: int) -> WorkerReport:
        """vLLM is about to give this worker's memory back: 1 keeps the weights on the host, 2 drops them.

        Raises:
            UpdateConflict: an update is under way.
            Refused, MemoryRefused: asleep already; no room on the host for what must not be lost.
        """
        if self.report().state in ("receiving", "staged", "applied"):
            raise UpdateConflict("an update is under way in this worker", hint="Wait for it to end, or abort it")
        counts = self._sleep.fall(level, loading.rewritten(self.model, self._base, self._frozen.names))
        self._regions.drop()
        return WorkerReport(self.rank, "", "none", wrote=self._wrote, checks=counts, memory=self._memory())

    def woken(self) -> WorkerReport:
        """vLLM has brought the memory back: what a deep sleep has lost, and no update brings, comes back too."""
        if self._sleep.deep:
            self._held.lose()
            self._planner.forget()
        return WorkerReport(self.rank, "", "none", wrote=self._wrote, checks=self._sleep.restore(), memory=self._memory())

    def stay_awake(self) -> WorkerReport:
        """The sleep that was prepared does not come: another worker can't."""
        self._sleep.forget()
        return WorkerReport(self.rank, "", "none", wrote=self._wrote)

    def _expect(self, update_id: str, *states: str) -> Receiver:
        receiver, at = self._receiver, self.report().state
        if receiver is None:
            raise Aborted("this worker has no update: its engine restarted meanwhile", hint="Sync again", update_id=update_id)
        if (have := receiver.order.request.update_id) != update_id or at not in states:
            raise InternalError(f"asked for {update_id} in state {' or '.join(states)}; have {have} in state {at}", update_id=update_id)
        return receiver
