"""Who may serve a request: whatever workers report, tables say and requests exclude, nobody else is ever named."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.booking import Booking
from router.core import RouterCore
from router.cost import CostWeights
from router.errors import AdapterNotHeld, NoCapacity
from router.ids import WorkerId
from router.reports import AdapterState, TableView, WorkerState
from tests.router.fleet import A1, B1, LONG, holding, report, request

NAMES = ("w0", "w1", "w2", "w3")
WORKERS = st.sampled_from(NAMES)
ADAPTERS = {"a": A1, "b": B1}
HOLDINGS = st.lists(
    st.tuples(
        WORKERS,
        st.sampled_from(sorted(ADAPTERS)),
        st.sampled_from([AdapterState.LOADED] * 4 + list(AdapterState)),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=8,
    unique_by=lambda row: row[:2],
)


class _Worker:
    """A worker as the model knows it."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.state = WorkerState.STARTING
        self.silent = False
        self.suspended = False
        self.held: set[str] = set()


class Eligibility(RuleBasedStateMachine):
    """Reports, silence, tables and lost adapters in any order, against a plain dict of workers."""

    @initialize()
    def start(self) -> None:
        self.core = RouterCore(CostWeights(), rng=random.Random(7))
        self.workers: dict[str, _Worker] = {}
        #: (worker, life, adapter) of the last table, loaded ones only
        self.table: set[tuple[str, int, str]] = set()
        self.version = 0
        self.lives = 0
        self.open: list[Booking] = []
        for name in NAMES:
            self.heartbeat(name, WorkerState.READY, again=True)

    @rule(name=WORKERS, state=st.one_of(st.just(WorkerState.READY), st.sampled_from(WorkerState)), again=st.booleans())
    def heartbeat(self, name: str, state: WorkerState, again: bool) -> None:
        """A heartbeat, or the first one of another life."""
        if name not in self.workers or not again:
            self.lives += 1
            self.workers[name] = _Worker(self.lives)
            self.take_table(name)
        worker = self.workers[name]
        worker.state, worker.silent = state, False
        self.core.report(report(name, f"i{worker.life}", state=state, max_loras_per_batch=1))

    @rule(name=WORKERS)
    def silence(self, name: str) -> None:
        self.core.silence(WorkerId(name))
        if name in self.workers:
            self.workers[name].silent = True

    @rule(name=WORKERS, suspended=st.booleans())
    def suspend(self, name: str, suspended: bool) -> None:
        self.core.suspend(WorkerId(name), suspended=suspended)
        if name in self.workers:
            self.workers[name].suspended = suspended

    @rule(name=WORKERS)
    def forget(self, name: str) -> None:
        self.core.forget(WorkerId(name))
        self.workers.pop(name, None)

    @rule(rows=HOLDINGS)
    def update_table(self, rows: list[tuple[str, str, AdapterState, bool]]) -> None:
        """A whole copy; some rows are of a life that is over."""
        self.version += 1
        self.table = set()
        holdings = []
        for name, adapter, state, is_stale in rows:
            life = 0 if is_stale or name not in self.workers else self.workers[name].life
            holdings.append(holding(name, adapter, ADAPTERS[adapter], state, incarnation=f"i{life}"))
            if state is AdapterState.LOADED:
                self.table.add((name, life, adapter))
        assert self.core.update_table(TableView(epoch="e", version=self.version, holdings=tuple(holdings)))
        for name in self.workers:
            self.take_table(name)

    @rule(name=WORKERS, adapter=st.sampled_from(sorted(ADAPTERS)))
    def lose(self, name: str, adapter: str) -> None:
        self.core.lose_adapter(WorkerId(name), adapter)
        if name in self.workers:
            self.workers[name].held.discard(adapter)

    @rule(adapter=st.sampled_from([None, *ADAPTERS]), exclude=st.sets(WORKERS, max_size=3))
    def serve(self, adapter: str | None, exclude: set[str]) -> None:
        """The decision names one of those that may serve it, or there are none."""
        asked = request(LONG, adapter=adapter, exclude=exclude)
        allowed = self.allowed(adapter) - exclude
        if not allowed:
            with pytest.raises(NoCapacity) as error:
                self.core.route(asked)
            assert isinstance(error.value, AdapterNotHeld) == bool(adapter and self.allowed(None) - exclude)
            return
        decision = self.core.route(asked)
        name = decision.source.worker_id
        assert name in allowed
        assert decision.source.incarnation == f"i{self.workers[name].life}"
        assert decision.lora_id == (None if adapter is None else ADAPTERS[adapter])
        assert decision.column == self.core.ingest.column(decision.source)
        self.open.append(self.core.book(decision, now_s=0.0))

    @rule()
    def finish(self) -> None:
        while self.open:
            self.open.pop().finish(now_s=1.0)
        assert not self.core.load.running.any()

    @invariant()
    def explained_are_all_and_only_those_that_may_serve(self) -> None:
        for adapter in (None, *ADAPTERS):
            allowed = self.allowed(adapter)
            found = self.core.explain(request(LONG, adapter=adapter)) if allowed else []
            assert sorted(candidate.worker for candidate in found) == sorted(allowed)
        assert {record.report.worker_id for record in self.core.ready_workers()} == self.allowed(None)
        self.core.check()

    def take_table(self, name: str) -> None:
        worker = self.workers[name]
        worker.held = {adapter for of, life, adapter in self.table if (of, life) == (name, worker.life)}

    def allowed(self, adapter: str | None) -> set[str]:
        """Ready workers; of these the heard, if any; of these the well, if any; of these the holders."""
        pool = {name for name, worker in self.workers.items() if worker.state is WorkerState.READY}
        pool = {name for name in pool if not self.workers[name].silent} or pool
        pool = {name for name in pool if not (self.workers[name].silent or self.workers[name].suspended)} or pool
        return {name for name in pool if adapter is None or adapter in self.workers[name].held}


TestEligibility = Eligibility.TestCase
TestEligibility.settings = settings(
    deadline=None, max_examples=100, stateful_step_count=30, derandomize=True, database=None
)
