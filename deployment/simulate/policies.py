"""Policies to hold ours against: what a user would pick otherwise. Each sees what its model in the field sees.

| name | of |
|---|---|
| round_robin, random, least_loaded | any load balancer |
| conversation_hash | session affinity of a gateway |
| prefix_approximate | SGLang's router: a history of its own, no events; defaults: threshold 0.3, balance 64 and 1.5 |
| name_keyed | KV events keyed by adapter name, with NVIDIA Dynamo's published cost: blocks to prefill, blocks active |
| oracle | knows each engine's state, speeds, output lengths; no strict bound, it too takes calls one by one |
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Final

from deployment.simulate.fleet import Flight, News, Simulation
from router.ids import LoraId

_Key = tuple[str | None, int]


class PlainPolicy:
    """Any worker. Base of the others: knows what it has sent, nothing else."""

    def __init__(self, sim: Simulation, seed: int) -> None:
        self._sim = sim
        self._rng = random.Random(seed)
        self._running = [0] * len(sim.workers)

    def choose(self, flight: Flight, now_s: float, alive: Sequence[int]) -> int:
        """See Policy."""
        worker = self._pick(flight, alive)
        self._running[worker] += 1
        self._sent(flight, worker)
        return worker

    def first_token(self, flight: Flight, now_s: float) -> None:
        """See Policy."""

    def ended(self, flight: Flight, now_s: float) -> None:
        """See Policy."""
        self._running[flight.worker] -= 1

    def heard(self, worker: int, batch: list[News], now_s: float) -> None:
        """See Policy."""

    def died(self, worker: int, now_s: float) -> None:
        """See Policy."""

    def returned(self, worker: int, now_s: float) -> None:
        """See Policy."""

    def reloaded(self, adapter: str, lora_id: LoraId) -> None:
        """See Policy."""

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        return self._rng.choice(alive)

    def _sent(self, flight: Flight, worker: int) -> None:
        pass

    def _least(self, alive: Sequence[int]) -> int:
        fewest = min(self._running[i] for i in alive)
        return self._rng.choice([i for i in alive if self._running[i] == fewest])


class RoundRobin(PlainPolicy):
    """One after the other."""

    _next = 0

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        self._next += 1
        return alive[self._next % len(alive)]


class LeastLoaded(PlainPolicy):
    """The fewest running requests."""

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        return self._least(alive)


class ConversationHash(PlainPolicy):
    """A conversation stays where its hash falls."""

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        key = f"{flight.call.adapter}/{flight.call.session}".encode()
        # not a CRC: it is linear, so that of two keys that differ little the same worker wins
        return max(alive, key=lambda worker: hashlib.md5(key + worker.to_bytes(2, "big")).digest())


class PrefixApproximate(PlainPolicy):
    """Where it has sent most of the prefix, unless loads differ too much."""

    _THRESHOLD: Final = 0.3
    _MAX_DIFFERENCE: Final = 64
    _MAX_RATIO: Final = 1.5

    def __init__(self, sim: Simulation, seed: int) -> None:
        super().__init__(sim, seed)
        self._known: list[OrderedDict[_Key, None]] = [OrderedDict() for _ in sim.workers]
        self._limit = sim.workers[0].model.kv_tokens // sim.page_size

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        loads = [self._running[i] for i in alive]
        if max(loads) - min(loads) > self._MAX_DIFFERENCE and max(loads) > self._MAX_RATIO * min(loads):
            return self._least(alive)
        depths = {i: self._depth(flight, i) for i in alive}
        best = max(alive, key=depths.__getitem__)
        if depths[best] > self._THRESHOLD * max(1, len(flight.call.pages)):
            return best
        smallest = min(len(self._known[i]) for i in alive)
        # full ones are all of one size here, unlike SGLang's, whose nodes have any
        return self._least([i for i in alive if len(self._known[i]) == smallest])

    def _depth(self, flight: Flight, worker: int) -> int:
        known, adapter = self._known[worker], flight.call.adapter
        for depth, page in enumerate(flight.call.pages):
            if (adapter, page) not in known:
                return depth
        return len(flight.call.pages)

    def _sent(self, flight: Flight, worker: int) -> None:
        known = self._known[worker]
        for page in flight.call.pages:
            known[flight.call.adapter, page] = None
            known.move_to_end((flight.call.adapter, page))
        while len(known) > self._limit:
            known.popitem(last=False)

    def died(self, worker: int, now_s: float) -> None:
        """See Policy."""
        self._known[worker].clear()


class NameKeyed(PlainPolicy):
    """KV events, an adapter being its name; cost in blocks, ties at random."""

    def __init__(self, sim: Simulation, seed: int) -> None:
        super().__init__(sim, seed)
        #: by worker: handles of what an adapter's name and page stand for
        self._held: list[dict[_Key, set[int]]] = [defaultdict(set) for _ in sim.workers]
        self._prefill = [0] * len(sim.workers)
        self._blocks = [0] * len(sim.workers)
        self._queued: dict[int, int] = {}

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        page_size = self._sim.page_size
        costs = {}
        for i in alive:
            overlap = self._depth(flight, i)
            prefill = (self._prefill[i] + flight.call.num_tokens) / page_size - overlap
            costs[i] = max(0.0, prefill) + self._blocks[i]
        least = min(costs.values())
        worker = self._rng.choice([i for i in alive if costs[i] <= least])
        flight.predicted = self._depth(flight, worker) * page_size
        return worker

    def _depth(self, flight: Flight, worker: int) -> int:
        held, adapter = self._held[worker], flight.call.adapter
        for depth, page in enumerate(flight.call.pages):
            if not held.get((adapter, page)):
                return depth
        return len(flight.call.pages)

    def _num_blocks(self, flight: Flight) -> int:
        return -(-flight.call.num_tokens // self._sim.page_size)

    def _sent(self, flight: Flight, worker: int) -> None:
        queued = max(0, flight.call.num_tokens - (flight.predicted or 0))
        self._queued[id(flight)] = queued
        self._prefill[worker] += queued
        self._blocks[worker] += self._num_blocks(flight)

    def first_token(self, flight: Flight, now_s: float) -> None:
        """See Policy."""
        self._prefill[flight.worker] -= self._queued.pop(id(flight), 0)

    def ended(self, flight: Flight, now_s: float) -> None:
        """See Policy."""
        super().ended(flight, now_s)
        self._prefill[flight.worker] -= self._queued.pop(id(flight), 0)
        self._blocks[flight.worker] -= self._num_blocks(flight)

    def heard(self, worker: int, batch: list[News], now_s: float) -> None:
        """See Policy."""
        held, meaning = self._held[worker], self._sim.prompts.meaning
        for news in batch:
            for hash_ in news.hashes:
                handles = held[meaning[hash_]]
                (handles.add if news.stored else handles.discard)(hash_)

    def died(self, worker: int, now_s: float) -> None:
        """See Policy."""
        self._held[worker].clear()


class Oracle(PlainPolicy):
    """The least time to first token, by the engines' true state."""

    def _pick(self, flight: Flight, alive: Sequence[int]) -> int:
        costs = {i: self._ttft_s(flight, i) for i in alive}
        least = min(costs.values())
        return self._rng.choice([i for i in alive if costs[i] <= least + 1e-6])

    def _ttft_s(self, flight: Flight, worker: int) -> float:
        settings, sim_worker = self._sim.settings, self._sim.workers[worker]
        profile, model = settings.profile, sim_worker.model
        now_s = self._sim.now_s

        def prefill_s(num_tokens: int, cached: int) -> float:
            new = num_tokens - min(cached, num_tokens - 1)
            pairs = new * (cached + new / 2)
            return (new * profile.prefill_ms_per_token + pairs * profile.attention_ms_per_token_pair) / 1000

        cached = sim_worker.cache.peek(flight.prompt.hashes)
        total_s = prefill_s(flight.call.num_tokens, cached) + profile.prefill_base_ms / 1000
        total_s += max(0.0, (model.next_s or now_s) - now_s) if model.is_prefilling else 0.0
        for job in model.pending():
            total_s += prefill_s(job.num_tokens - job.done, job.done or sim_worker.cache.peek(job.prompt))
        running = Counter(job.adapter for job in model.running)
        adapters = set(running) | {job.adapter for job in model.pending()}
        lora_id = flight.prompt.lora_id
        if settings.num_slots and lora_id not in adapters and len(adapters) >= settings.num_slots:
            left: dict[object, int] = {}
            for job in model.running:
                left[job.adapter] = max(left.get(job.adapter, 0), job.max_output - job.emitted)
            step_s = (profile.decode_base_ms + len(model.running) * profile.decode_ms_per_request) / 1000
            waits = sorted(left.values())
            over = len(adapters) - settings.num_slots
            total_s += (waits[min(over, len(waits) - 1)] if waits else 0) * step_s
        needed = flight.call.num_tokens + flight.call.num_output - cached
        room = model.kv_tokens - sim_worker.cache.held - model.private_tokens + sim_worker.cache.evictable
        if needed > room:
            shortest = min((job.max_output - job.emitted for job in model.running), default=0)
            total_s += shortest * profile.decode_base_ms / 1000
        return total_s


PLAIN: Final = {
    "round_robin": RoundRobin,
    "random": PlainPolicy,
    "least_loaded": LeastLoaded,
    "conversation_hash": ConversationHash,
    "prefix_approximate": PrefixApproximate,
    "name_keyed": NameKeyed,
    "oracle": Oracle,
}
