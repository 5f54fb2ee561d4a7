"""The fleet's book under any order of events: what must hold after each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.test_ledger import MANIFEST, engine, fleet, request, verdict
from weightsync.errors import Aborted, EngineDied, Refused
from weightsync.fleet.ledger import Ledger, Update
from weightsync.protocol import EngineState, UpdateState

ENGINES = 3
WAY = [UpdateState.RECEIVING, UpdateState.STAGED, UpdateState.APPLYING]

ordinals = st.integers(0, ENGINES - 1)


class AnyOrder(RuleBasedStateMachine):
    """Random events of a fleet of three."""

    @initialize(require=st.sampled_from([None, 1, 2]), history=st.integers(1, 4))
    def start(self, require: int | None, history: int) -> None:
        self.ledger: Ledger = fleet(engines=ENGINES, require=require, history=history)
        self.history = history
        self.number = 0
        self.ended: list[Update] = []
        self.reached: tuple[int, int] | None = None  # (rewinds, version), as last seen
        self.may_go_back = False  # a rewind has been committed, or an engine knows of one

    @property
    def update(self) -> Update:
        assert self.ledger.current is not None
        return self.ledger.current

    @rule(version=st.integers(0, 12), rewind=st.booleans())
    def admit(self, version: int, rewind: bool) -> None:
        self.number += 1
        busy, floor = self.ledger.current, self.ledger.committed_version
        try:
            update = self.ledger.admit(replace(request(f"u{self.number}", version), rewind=rewind), 0.0)
        except (Refused, EngineDied):
            assert self.ledger.current is busy
            return
        assert busy is None and self.ledger.current is update
        assert rewind or floor is None or version >= floor
        assert self.ledger.committed_version == floor  # admission alone moves nothing
        self.admitted_at = (self.ledger.rewinds, floor)
        assert self.ledger.repeated(update.request) is update

    @precondition(lambda self: self.ledger.current is not None and self.ledger.current.state != UpdateState.APPLYING)
    @rule()
    def step(self) -> None:
        self.update.move(WAY[WAY.index(self.update.state) + 1] if self.update.state in WAY else WAY[0])

    @precondition(lambda self: self.ledger.current is not None and self.ledger.current.state != UpdateState.APPLYING)
    @rule()
    def abort(self) -> None:
        update, before = self.update, (self.ledger.rewinds, self.ledger.committed_version)
        self.ledger.abort(update, Aborted("stop"), 1.0)
        self.ended.append(update)
        assert update.state == UpdateState.ABORTED
        assert (self.ledger.rewinds, self.ledger.committed_version) == before

    @precondition(lambda self: self.ledger.current is not None and self.ledger.current.state == UpdateState.APPLYING)
    @rule(data=st.data())
    def conclude(self, data: Any) -> None:
        update, before = self.update, (self.ledger.rewinds, self.ledger.committed_version)
        committed = [data.draw(st.booleans()) for _ in update.engines]
        self.may_go_back = update.request.rewind
        verdicts = [verdict(ordinal, update.request.version, ok) for ordinal, ok in zip(update.engines, committed, strict=True)]
        enough = self.ledger.conclude(update, verdicts, 2.0)
        self.ended.append(update)
        assert enough == (sum(committed) >= self.ledger.require)
        assert update.state == (UpdateState.COMMITTED if enough else UpdateState.ABORTED)
        if not any(committed):
            assert (self.ledger.rewinds, self.ledger.committed_version) == before
        elif before == self.admitted_at:  # no engine came with news meanwhile
            assert self.ledger.committed_version == update.request.version
            assert self.ledger.ready >= sum(committed)

    @rule(ordinal=ordinals, version=st.none() | st.integers(0, 14), rewinds=st.integers(0, 3))
    def see(self, ordinal: int, version: int | None, rewinds: int) -> None:
        before = (self.ledger.rewinds, self.ledger.committed_version)
        self.may_go_back = rewinds > self.ledger.rewinds
        self.ledger.see(replace(engine(ordinal, version), rewinds=rewinds))
        if version is None or rewinds < before[0]:
            assert (self.ledger.rewinds, self.ledger.committed_version) == before

    @rule(ordinal=ordinals)
    def lose(self, ordinal: int) -> None:
        self.ledger.lose(ordinal, "gone")

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def begin_an_ended_one_again(self, data: Any) -> None:
        update, busy = data.draw(st.sampled_from(self.ended)), self.ledger.current
        if self.ledger.get(update.request.update_id) is None:
            return  # older than what is remembered
        for call in (self.ledger.repeated, lambda r: self.ledger.admit(r, 3.0)):
            try:
                call(update.request)
            except Refused as error:
                assert "has ended" in error.message
            else:
                raise AssertionError("an update that has ended began again")
        assert self.ledger.current is busy

    @invariant()
    def versions_fall_by_a_rewind_alone(self) -> None:
        now = (self.ledger.rewinds, -1 if self.ledger.committed_version is None else self.ledger.committed_version)
        if self.reached is not None:
            assert now >= self.reached
            assert now[0] == self.reached[0] or self.may_go_back
        self.reached, self.may_go_back = now, False

    @invariant()
    def one_update_is_under_way_at_most(self) -> None:
        under_way = [update for update in self.ledger.list() if not update.state.final]
        assert under_way == ([self.ledger.current] if self.ledger.current else [])
        assert len(under_way) <= 1
        assert len(self.ledger.list()) <= self.history + len(under_way)

    @invariant()
    def ready_engines_serve_the_committed_version(self) -> None:
        able = [e for e in self.ledger.engines.values() if e.state == EngineState.SERVING and e.version is not None]
        right = [e for e in able if (e.rewinds, e.version) == (self.ledger.rewinds, self.ledger.committed_version)]
        assert self.ledger.ready == len(right)

    @invariant()
    def an_update_holds_its_manifest_while_it_is_under_way_and_its_size_for_good(self) -> None:
        for update in self.ended:
            assert update.request.manifest.tensors == () and update.status.nbytes == MANIFEST.nbytes
        if self.ledger.current is not None:
            assert self.ledger.current.request.manifest == MANIFEST


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
