"""The simulation itself: calls arrive, a policy chooses, model engines compute, events travel. Time is virtual."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from actors.engine.emulated.model import EngineModel, Job
from actors.engine.emulated.pages import PageCache
from actors.engine.emulated.profiles import Profile
from deployment.simulate.prompts import Prompt, PromptBook
from deployment.simulate.trace import Call, Trace
from router.ids import LoraId

RETRY_S: Final = 0.05
"""From the death of a worker to the next attempt of what it had."""
_MAX_VIRTUAL_S: Final = 24 * 3600.0


class FleetTooSmallError(RuntimeError):
    """The traffic can't be served; the message says how much is left."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, and what goes wrong in it."""

    profile: Profile
    num_workers: int
    num_slots: int = 8
    kv_tokens: int = 0
    """Of each worker; 0 for the profile's."""
    event_delay_s: float = 0.001
    event_loss: float = 0.0
    """Share of event batches that are lost on their way; those behind one wait until it is fetched."""
    ingress_ms: float = 1.0
    """What any router adds."""
    fail_every_s: float | None = None
    """A worker dies so often, another each time, and comes back empty."""
    fail_for_s: float = 20.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError that says what is allowed."""
        least = min(self.num_slots, self.kv_tokens, self.event_delay_s, self.ingress_ms, self.fail_for_s)
        allowed = {
            "num_workers must be at least 1": self.num_workers >= 1,
            "num_slots, kv_tokens, event_delay_s, ingress_ms and fail_for_s at least 0": least >= 0,
            "event_loss from 0 to 1": 0 <= self.event_loss <= 1,
            "fail_every_s above 0": self.fail_every_s is None or self.fail_every_s > 0,
        }
        if not all(allowed.values()):
            raise ValueError(f"{', '.join(allowed)}; got {self}")


class News(NamedTuple):
    """An event: pages stored after another (None: from the start), or removed."""

    stored: bool
    hashes: list[int]
    parent: int | None = None


@dataclass(slots=True, eq=False)
class Flight:
    """A call on its way."""

    call: Call
    prompt: Prompt
    worker: int = -1
    job: Job[Sequence[int]] | None = None
    #: what the policy keeps of it
    token: Any = None
    predicted: int | None = None
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float | None = None
    retries: int = 0


class Policy(Protocol):
    """How a worker is chosen. Told of everything that a router would see, and nothing else (but for the oracle)."""

    def choose(self, flight: Flight, now_s: float, alive: Sequence[int]) -> int:
        """The worker for a call, of those that are alive."""

    def first_token(self, flight: Flight, now_s: float) -> None:
        """Its first token has come."""

    def ended(self, flight: Flight, now_s: float) -> None:
        """It is over, or its worker has died."""

    def heard(self, worker: int, batch: list[News], now_s: float) -> None:
        """A batch of events has come from a worker."""

    def died(self, worker: int, now_s: float) -> None:
        """A worker is gone with all that it held."""

    def returned(self, worker: int, now_s: float) -> None:
        """It is back, empty."""

    def reloaded(self, adapter: str, lora_id: LoraId) -> None:
        """An adapter has other weights from now on."""


@dataclass(slots=True)
class SimWorker:
    """A model engine."""

    model: EngineModel[Sequence[int]]
    cache: PageCache
    flights: dict[int, Flight] = field(default_factory=dict)
    #: what it has stored and removed and not told yet
    news: list[News] = field(default_factory=list)
    #: batches of which the first was lost, in order, until it is fetched
    late: list[list[News]] = field(default_factory=list)
    alive: bool = True
    #: counts its lives
    life: int = 0
    swaps: int = 0
    busy_s: float = 0.0


class Simulation:
    """One run. `run` once; then read `flights` and `workers`."""

    def __init__(self, trace: Trace, settings: FleetSettings, *, reload_s: float | None = None) -> None:
        """Each adapter gets other weights every `reload_s`."""
        if reload_s is not None and not reload_s > 0:
            raise ValueError(f"reload_s must be above 0, got {reload_s}")
        self.settings = settings
        self.page_size = trace.page_size
        self.prompts = PromptBook(trace.page_size)
        self.flights = [Flight(call, self.prompts.prompt(call)) for call in trace.calls]
        self.workers = [self._worker() for _ in range(settings.num_workers)]
        self.now_s = 0.0
        self._rng = random.Random(settings.seed)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._open = len(self.flights)
        self._reload_s = reload_s
        self.policy: Policy

    def run(self, policy: Policy) -> None:
        """Play the trace to the end of its last call. Raises FleetTooSmallError."""
        self.policy = policy
        for flight in self.flights:
            self._at(flight.call.at_s + self.settings.ingress_ms / 1000, self._dispatch, flight)
        if self._reload_s and (adapters := sorted({f.call.adapter for f in self.flights if f.call.adapter})):
            self._at(self._reload_s / len(adapters), self._reload, adapters, 0)
        if self.settings.fail_every_s:
            self._at(self.settings.fail_every_s, self._fail, 0)
        end_s = max(flight.call.at_s for flight in self.flights) + _MAX_VIRTUAL_S
        while self._open:
            at_s, _, act, arguments = heapq.heappop(self._heap)
            self.now_s = at_s
            if at_s > end_s:
                raise FleetTooSmallError(
                    f"{self._open} calls aren't served a day after the last: the fleet is far too small"
                )
            act(*arguments)

    def _at(self, at_s: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), act, arguments))

    def _worker(self) -> SimWorker:
        settings = self.settings
        news: list[News] = []
        cache = PageCache(
            self.page_size,
            stored=lambda hashes, parent: news.append(News(True, hashes, parent)),
            removed=lambda hashes: news.append(News(False, hashes)),
        )
        model = EngineModel(settings.profile, cache, num_slots=settings.num_slots, kv_tokens=settings.kv_tokens)
        return SimWorker(model, cache, news=news)

    def _dispatch(self, flight: Flight) -> None:
        alive = [i for i, worker in enumerate(self.workers) if worker.alive]
        if not alive:
            self._at(self.now_s + 1.0, self._dispatch, flight)
            return
        flight.prompt = self.prompts.prompt(flight.call)  # its adapter may have been reloaded since
        flight.sent_s = self.now_s
        flight.worker = self.policy.choose(flight, self.now_s, alive)
        worker = self.workers[flight.worker]
        job: Job[Sequence[int]] = Job(
            flight.prompt.hashes, flight.call.num_tokens, flight.call.num_output, flight.prompt.lora_id
        )
        flight.job = job
        worker.flights[id(job)] = flight
        before_s = worker.model.next_s
        worker.model.submit(job, self.now_s)
        if worker.model.next_s != before_s:
            self._wake(flight.worker)
        self._tell(flight.worker)

    def _wake(self, index: int) -> None:
        worker = self.workers[index]
        if worker.model.next_s is not None:
            self._at(worker.model.next_s, self._advance, index, worker.life, worker.model.next_s)

    def _advance(self, index: int, life: int, due_s: float) -> None:
        worker = self.workers[index]
        if worker.life != life or worker.model.next_s != due_s:
            return
        output = worker.model.advance()
        for job, _ in output.tokens:
            flight = worker.flights[id(job)]
            if flight.first_s is None:
                flight.first_s = self.now_s
                self.policy.first_token(flight, self.now_s)
        for job in output.ended:
            flight = worker.flights.pop(id(job))
            flight.ended_s = self.now_s
            self._open -= 1
            self.policy.ended(flight, self.now_s)
        self._wake(index)
        self._tell(index)

    def _tell(self, index: int) -> None:
        """Send what the worker's cache has gained and lost."""
        worker = self.workers[index]
        if worker.news:
            news, worker.news[:] = list(worker.news), []
            self._at(self.now_s + self.settings.event_delay_s, self._hear, index, worker.life, news)

    def _hear(self, index: int, life: int, news: list[News]) -> None:
        worker = self.workers[index]
        if worker.life != life:
            return
        if worker.late:
            worker.late.append(news)
        elif self._rng.random() < self.settings.event_loss:
            # found by the next batch or heartbeat, and fetched a second later at most
            worker.late.append(news)
            self._at(self.now_s + self._rng.random(), self._fetch, index, life)
        else:
            self.policy.heard(index, news, self.now_s)

    def _fetch(self, index: int, life: int) -> None:
        worker = self.workers[index]
        if worker.life != life:
            return
        late, worker.late = worker.late, []
        for news in late:
            self.policy.heard(index, news, self.now_s)

    def _reload(self, adapters: list[str], i: int) -> None:
        assert self._reload_s is not None
        adapter = adapters[i % len(adapters)]
        self.policy.reloaded(adapter, self.prompts.reload(adapter))
        self._at(self.now_s + self._reload_s / len(adapters), self._reload, adapters, i + 1)

    def _fail(self, i: int) -> None:
        assert self.settings.fail_every_s is not None
        index = i % len(self.workers)
        worker = self.workers[index]
        if worker.alive and sum(w.alive for w in self.workers) > 1:
            worker.alive = False
            worker.life += 1
            self.policy.died(index, self.now_s)
            for flight in worker.flights.values():
                self.policy.ended(flight, self.now_s)
                flight.retries += 1
                flight.first_s = None
                self._at(self.now_s + RETRY_S, self._dispatch, flight)
            worker.flights = {}
            self._at(self.now_s + self.settings.fail_for_s, self._return, index)
        self._at(self.now_s + self.settings.fail_every_s, self._fail, i + 1)

    def _return(self, index: int) -> None:
        old, new = self.workers[index], self._worker()
        new.life = old.life + 1
        new.swaps, new.busy_s = old.swaps + old.model.swaps, old.busy_s + old.model.busy_s
        self.workers[index] = new
        self.policy.returned(index, self.now_s)
