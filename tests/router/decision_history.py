"""Random lives of a fleet, for tests of the decision log: reports, holdings, stores, bookings and requests."""

from __future__ import annotations

import random
from dataclasses import replace

from router.booking import Booking
from router.core import RouterCore
from router.cost import CostWeights
from router.errors import NoCapacity
from router.ids import WorkerId
from router.reports import WorkerReport, WorkerState
from tests.router.fleet import A1, B1, LONG, Fleet, hashes, holding, report, request, source

NAMES = ("w0", "w1", "w2", "w3")
STATES = (WorkerState.READY,) * 10 + (WorkerState.DRAINING, WorkerState.FAILED)


class History:
    """One life of a router. Each step is something that happens to it."""

    def __init__(self, seed: int, weights: CostWeights | None = None) -> None:
        self._rng = random.Random(seed)
        self._fleet = Fleet(seed)
        if weights is not None:
            self._fleet.core = RouterCore(weights, rng=random.Random(seed))
        self._lives = dict.fromkeys(NAMES, 0)
        #: workers whose engines haven't been caught up with
        self._unsynced: set[str] = set()
        self._open: list[Booking] = []
        self._now_s = 0.0
        for name in NAMES:
            self._start(name)

    @property
    def core(self) -> RouterCore:
        return self._fleet.core

    def go_on(self, num_steps: int) -> None:
        """So many steps, most of them requests."""
        happen = [self._route] * 14 + [self._answer] * 6 + [self._finish] * 4
        happen += [self._start_or_report] * 4 + [self._store, self._load, self._doubt, self._learn]
        for _ in range(num_steps):
            self._now_s += self._rng.expovariate(20.0)
            self._rng.choice(happen)()
        self.core.check()

    def _route(self) -> None:
        shared = self._rng.choice((0, 16, 200, 401))
        own = [self._rng.randrange(1000, 2000) for _ in range(self._rng.choice((0, 1, 30, 800)))]
        asked = request(
            LONG[:shared] + own,
            adapter=self._rng.choice((None, None, "a", "b")),
            exclude={WorkerId(name) for name in self._rng.sample(NAMES, self._rng.choice((0, 0, 1, 2)))},
            max_output_tokens=self._rng.choice((None, 1, 4000)),
            now_s=self._now_s,
        )
        if self._rng.random() < 0.1:
            asked = replace(asked, packed_tokens=None)
        try:
            decision = self.core.route(asked)
        except NoCapacity:
            return
        self._open.append(self.core.book(decision, now_s=self._now_s))

    def _answer(self) -> None:
        if self._open:
            self._rng.choice(self._open).first_token(now_s=self._now_s)

    def _finish(self) -> None:
        if self._open:
            self._open.pop(self._rng.randrange(len(self._open))).finish(now_s=self._now_s)

    def _start_or_report(self) -> None:
        name = self._rng.choice(NAMES)
        if self._rng.random() < 0.3:
            self._start(name)
        else:
            self.core.report(self._report(name, self._rng.choice(STATES)))

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        if self._rng.random() < 0.2:
            self._unsynced.add(name)
            self.core.report(self._report(name, WorkerState.READY))
        else:
            self._unsynced.discard(name)
            self._fleet.start(self._report(name, WorkerState.READY))
        self._load()

    def _report(self, name: str, state: WorkerState) -> WorkerReport:
        return report(name, f"i{self._lives[name]}", state=state, max_loras_per_batch=1, max_total_tokens=6000)

    def _store(self) -> None:
        name, lora_id = self._rng.choice(NAMES), self._rng.choice((None, A1, B1))
        if name not in self._unsynced:
            self._fleet.store(source(name, f"i{self._lives[name]}"), hashes(LONG, lora_id)[: self._rng.randrange(101)])

    def _load(self) -> None:
        self._fleet.load(
            *[
                holding(name, adapter, lora_id, incarnation=f"i{life}")
                for name, life in self._lives.items()
                for adapter, lora_id in (("a", A1), ("b", B1))
                if self._rng.random() < 0.7
            ]
        )

    def _doubt(self) -> None:
        name = WorkerId(self._rng.choice(NAMES))
        if self._rng.random() < 0.5:
            self.core.suspend(name, suspended=self._rng.random() < 0.5)
        else:
            self.core.silence(name)

    def _learn(self) -> None:
        self.core.load.learn_output(self._rng.randrange(1, 2000))
