"""SGLang's scheduler in virtual time: what runs when, what it reuses and how long that takes. Pure; no clock, no IO.

Theory of operation. One step at a time. A prefill step comes before any decode step: waiting requests first come
first served, those whose adapter finds no slot passed over (SGLang's `can_schedule_lora_req`), up to
`chunk_tokens` new tokens, the last one cut where they end and continued first in the next step. A prompt's blocks
are stored when its prefill ends, or its chunk, and its output's when it ends, where the cache knows what that is. Room
for a request's whole output is set aside, so that none is ever retracted, which SGLang might.
Source: sglang.srt.managers.scheduler (0.5.23), get_new_batch_prefill.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from actors.engine.emulated.profiles import Profile

_MAX_STEPS: Final = 64
"""Decode steps taken at once at most, where no request comes or ends."""
P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)


class Cache(Protocol[P_contra]):
    """A prefix cache, in tokens of whole pages."""

    @property
    def held(self) -> int:
        """Tokens that it holds."""

    @property
    def evictable(self) -> int:
        """Those of them that nobody has locked."""

    def match(self, prompt: P_contra, num_tokens: int) -> tuple[int, Any]:
        """Tokens held of the full pages of the first `num_tokens`, and the place where they end."""

    def insert(self, prompt: P_contra, num_tokens: int) -> tuple[int, Any]:
        """Store the full pages of the first `num_tokens`; returns their tokens, and the place where they end."""

    def lock(self, place: Any) -> Any:
        """Keep all from the start to a place; returns what `unlock` takes."""

    def unlock(self, lock: Any) -> None:
        """Undo one `lock`."""

    def evict(self, num_tokens: int) -> None:
        """Give up so many tokens or somewhat more, the longest unused first."""


@dataclass(slots=True, eq=False)
class Job(Generic[P]):
    """One request. The first four fields are the caller's."""

    prompt: P
    num_tokens: int
    max_output: int
    adapter: Hashable | None = None
    #: tokens of output so far
    emitted: int = 0
    #: tokens of the prompt that were reused
    cached: int = 0
    #: tokens of the prompt in the cache or computed
    done: int = 0
    #: keeps its stored pages
    lock: Any = None
    #: of its tokens, those that its pages in the cache cover
    stored: int = 0
    aborted: bool = False


@dataclass(slots=True)
class Output(Generic[P]):
    """What a step gave: tokens for jobs, in order, and whether each is over."""

    tokens: list[tuple[Job[P], int]] = field(default_factory=list)
    ended: list[Job[P]] = field(default_factory=list)


class EngineModel(Generic[P]):
    """One engine, one rank. `submit` and `abort` at any time; `advance` when `next_s` has come."""

    def __init__(
        self,
        profile: Profile,
        cache: Cache[P],
        *,
        num_slots: int = 0,
        kv_tokens: int = 0,
        page_size: int = 1,
        max_steps: int = _MAX_STEPS,
    ) -> None:
        """`num_slots`: adapters in one batch, the base model being one; 0 for any number. `kv_tokens` 0: profile's."""
        self._profile = profile
        self._cache = cache
        self._num_slots = num_slots
        self._page_size = page_size
        self.kv_tokens = kv_tokens or profile.kv_tokens
        self._max_steps = max_steps
        self.waiting: list[Job[P]] = []
        self.running: list[Job[P]] = []
        #: when the present step, or row of decode steps, ends; None while idle
        self.next_s: float | None = None
        self.swaps = 0
        self.busy_s = 0.0
        self.computed_tokens = 0
        #: adapters in slots, the longest unused first
        self._resident: OrderedDict[Hashable | None, None] = OrderedDict()
        self._batch: list[tuple[Job[P], int]] = []
        self._chunked: Job[P] | None = None
        self._started_s = 0.0
        self._step_s = 0.0
        self._steps = 0

    @property
    def waiting_tokens(self) -> int:
        """Of prompts whose prefill hasn't begun or ended."""
        batch = sum(job.num_tokens - job.done for job, _ in self._batch)
        return sum(job.num_tokens for job in self.waiting) + batch

    @property
    def private_tokens(self) -> int:
        """KV cache that running requests hold beyond what the prefix cache counts."""
        return _private(self.running) + _private(job for job, _ in self._batch)

    @property
    def is_prefilling(self) -> bool:
        """Whether the present step computes prompts."""
        return bool(self._batch)

    def pending(self) -> list[Job[P]]:
        """Requests whose first token isn't under way: waiting ones, and one that was cut."""
        return self.waiting if self._chunked is None else [self._chunked, *self.waiting]

    def submit(self, job: Job[P], now_s: float) -> None:
        """A request has come."""
        self.waiting.append(job)
        if self.next_s is None:
            self._plan(now_s)
        else:
            self._cut_row(now_s)

    def abort(self, job: Job[P], now_s: float) -> None:
        """The request is to end; its slot and memory are free after the present step."""
        job.aborted = True
        if job in self.waiting:
            self.waiting.remove(job)
        elif job in self.running:
            self._cut_row(now_s)

    def advance(self) -> Output[P]:
        """End the present step and begin the next."""
        assert self.next_s is not None
        now_s = self.next_s
        self.busy_s += now_s - self._started_s
        output: Output[P] = Output()
        if self._batch:
            self._end_prefill(output)
        else:
            self._end_decode(output)
        self._plan(now_s)
        return output

    # -- steps ---------------------------------------------------------------------------------------------------

    def _cut_row(self, now_s: float) -> None:
        """Of a row of decode steps, end with the one under way."""
        if self._batch:
            return
        done = max(1, math.ceil((now_s - self._started_s) / self._step_s)) if self._step_s else 1
        self._steps = min(self._steps, done)
        self.next_s = self._started_s + self._steps * self._step_s

    def _plan(self, now_s: float) -> None:
        """Begin the next step."""
        for job in [job for job in self.running if job.aborted]:
            self._end(job)
        duration_ms = self._plan_prefill()
        if not self._batch:
            duration_ms = self._plan_decode()
        self._started_s = now_s
        self._step_s = duration_ms / 1000
        self.next_s = now_s + self._step_s * self._steps if self._steps else None

    def _plan_prefill(self) -> float:
        profile, budget = self._profile, self._profile.chunk_tokens
        batch: list[tuple[Job[P], int]] = []
        if self._chunked is not None and self._chunked.aborted:
            self._release(self._chunked)
            self._chunked = None
        if (job := self._chunked) is not None:
            take = min(job.num_tokens - job.done, budget)
            batch.append((job, take))
            budget -= take
            if job.done + take == job.num_tokens:
                self._chunked = None
        self._admit(batch, budget)
        self._batch = batch
        self._steps = 1 if batch else 0
        if not batch:
            return 0.0
        swaps = self._swap_in([job.adapter for job, _ in batch])
        self.computed_tokens += sum(take for _, take in batch)
        pairs = sum(take * (job.done + take / 2) for job, take in batch)
        return (
            profile.prefill_base_ms
            + sum(take for _, take in batch) * profile.prefill_ms_per_token
            + pairs * profile.attention_ms_per_token_pair
            + swaps * profile.swap_ms
        )

    def _admit(self, batch: list[tuple[Job[P], int]], budget: int) -> None:
        adapters = {job.adapter for job in self.running} | {job.adapter for job, _ in batch}
        taken = self._cache.held + _private(self.running) + _private(job for job, _ in batch)
        admitted: set[int] = set()
        for job in self.waiting:
            if budget <= 0 or self._chunked is not None or len(self.running) + len(batch) >= self._profile.max_running:
                break
            if self._num_slots and job.adapter not in adapters and len(adapters) >= self._num_slots:
                continue
            cached, place = self._cache.match(job.prompt, job.num_tokens - 1)  # the last token is always computed
            needed = job.num_tokens - cached + job.max_output
            spare = max(0, self._page_size - job.max_output)  # a page for each request (alloc_paged_token_slots_extend)
            lock = self._cache.lock(place)
            missing = taken + needed - self.kv_tokens
            if missing > self._cache.evictable and (self.running or batch or admitted):
                self._cache.unlock(lock)
                break
            if missing + spare > 0:
                held = self._cache.held
                self._cache.evict(missing + spare)
                taken -= held - self._cache.held
            taken += needed
            job.cached = job.done = job.stored = cached
            job.lock = lock
            take = min(job.num_tokens - cached, budget)
            budget -= take
            batch.append((job, take))
            admitted.add(id(job))
            adapters.add(job.adapter)
            if cached + take < job.num_tokens:
                self._chunked = job
        if admitted:
            self.waiting = [job for job in self.waiting if id(job) not in admitted]

    def _plan_decode(self) -> float:
        if not self.running:
            self._steps = 0
            return 0.0
        for job in self.running:
            self._resident.move_to_end(job.adapter)
        profile = self._profile
        self._steps = min(self._max_steps, min(job.max_output - job.emitted for job in self.running))
        context = sum(job.num_tokens + job.emitted for job in self.running)
        return (
            profile.decode_base_ms
            + len(self.running) * profile.decode_ms_per_request
            + context * profile.decode_ms_per_context_token
        )

    def _end_prefill(self, output: Output[P]) -> None:
        batch, self._batch = self._batch, []
        for job, take in batch:
            job.done += take
            if job.done < job.num_tokens:
                self._store(job)
                continue
            if job.aborted:
                self._release(job)
                continue
            self._store(job)
            self.running.append(job)
            self._emit(job, 1, output)

    def _end_decode(self, output: Output[P]) -> None:
        for job in [job for job in self.running if not job.aborted]:
            self._emit(job, self._steps, output)

    def _emit(self, job: Job[P], num_tokens: int, output: Output[P]) -> None:
        job.emitted += num_tokens
        output.tokens.append((job, num_tokens))
        if job.emitted >= job.max_output:
            self._end(job)
            output.ended.append(job)

    def _store(self, job: Job[P]) -> None:
        """The pages computed so far are everybody's now."""
        job.stored, place = self._cache.insert(job.prompt, job.done)
        lock = self._cache.lock(place)
        self._cache.unlock(job.lock)
        job.lock = lock

    def _end(self, job: Job[P]) -> None:
        self.running.remove(job)
        self._cache.insert(job.prompt, job.num_tokens + job.emitted - 1)  # the last token has no KV yet
        self._release(job)

    def _release(self, job: Job[P]) -> None:
        self._cache.unlock(job.lock)
        job.lock = None

    def _swap_in(self, adapters: list[Hashable | None]) -> int:
        """Swaps of adapters that aren't in a slot."""
        swaps = 0
        for adapter in adapters:
            if adapter not in self._resident:
                swaps += adapter is not None
                self._resident[adapter] = None
            self._resident.move_to_end(adapter)
        running = {job.adapter for job in self.running} | set(adapters)
        for adapter in sorted(self._resident, key=lambda adapter: adapter is None):  # the base model last
            if not self._num_slots or len(self._resident) <= self._num_slots:
                break
            if adapter not in running:
                del self._resident[adapter]
        self.swaps += swaps
        return swaps


def _private(jobs: Iterable[Job[Any]]) -> int:
    """Tokens of the KV cache that jobs need, those beside that the prefix cache counts."""
    return sum(job.num_tokens + job.max_output - job.stored for job in jobs)
