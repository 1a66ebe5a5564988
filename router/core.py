"""RouterCore: all routing state and the decision. No IO, clock, Ray, threads; one event loop owns it.

Theory of operation. Workers report themselves (WorkerReport), the LoRA table sends whole copies of itself
(TableView), event batches go to EventIngest. `route` recomputes the hashes that each candidate's engine would
publish for the prompt, follows them in the index, and picks the least cost; `explain` shows all candidates.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
from numpy.typing import NDArray

from router.booking import Booking
from router.choice import LoggedCandidate, LoggedDecision, choose, left_out
from router.cost import CostWeights, Demand, estimate
from router.decision import Decision, Reason, RouteRequest
from router.effects import Effect
from router.errors import AdapterNotHeld, NoCapacity
from router.evaluation import Evaluation, Made, candidates
from router.hashing import TOKEN_BYTES
from router.holders import Holders, Target, WorkerRecord
from router.ids import LoraId, SourceId, WorkerId
from router.ingest import EventIngest, SourceState
from router.load import LoadBook
from router.predict import UNKNOWN, Predictor
from router.reports import TableView, WorkerReport, WorkerState
from router.roster import Roster

MAX_KEPT = 1024
"""Decisions that a router can show."""
MAX_EXTRA_KEYS = 64
"""extra_keys that attestation tries where a hash isn't explained without."""


class RouterCore:
    """See the module. Mutators: `report`, `forget`, `update_table`, `book`, and those of `ingest`."""

    def __init__(
        self,
        weights: CostWeights,
        *,
        rng: random.Random,
        hash_seed: int = 0,
        min_blocks: int = 0,
        max_index_bytes: int | None = None,
    ) -> None:
        self.ingest = EventIngest(min_blocks=min_blocks, max_bytes=max_index_bytes)
        self.predictor = Predictor(self.ingest.index, hash_seed=hash_seed)
        self.load = LoadBook(
            prefill_tokens_per_s=weights.prefill_tokens_per_s,
            overhead_ms=weights.overhead_ms,
            decode_step_ms=weights.decode_step_ms,
            slot_wait_ms=weights.slot_wait_ms,
            request_ms=weights.request_ms,
            output_tokens=weights.output_tokens,
            adapter_load_ms=weights.adapter_load_ms,
        )
        self._weights = weights
        #: draws lots among equals, see choice.py
        self.seed = rng.getrandbits(64)
        self._num_decisions = 0
        #: the latest decisions
        self._recent: deque[Made] = deque(maxlen=MAX_KEPT)
        #: extra_keys of requests, the latest last; attestors look at them
        self._extra_keys: dict[str, None] = {}
        self._roster = Roster(self.ingest, self.load, extra_keys=self._extra_keys.keys())

    # -- write path ----------------------------------------------------------------------------------------------

    def report(self, report: WorkerReport) -> list[Effect]:
        """See Roster."""
        return self._roster.report(report)

    def silence(self, worker_id: WorkerId) -> None:
        """See Roster."""
        self._roster.silence(worker_id)

    def suspend(self, worker_id: WorkerId, *, suspended: bool) -> None:
        """See Roster."""
        self._roster.suspend(worker_id, suspended=suspended)

    def forget(self, worker_id: WorkerId) -> list[Effect]:
        """See Roster."""
        return self._roster.forget(worker_id)

    def update_table(self, view: TableView) -> bool:
        """See Roster."""
        return self._roster.update_table(view)

    @property
    def workers(self) -> dict[WorkerId, WorkerRecord]:
        """Workers that have reported and weren't forgotten."""
        return self._roster.workers

    @property
    def restarts(self) -> Counter[WorkerId]:
        """Engine lives that were followed by another, by worker."""
        return self._roster.restarts

    @property
    def table(self) -> TableView:
        """Our copy of the LoRA table."""
        return self._roster.table

    # -- read path -----------------------------------------------------------------------------------------------

    def route(self, request: RouteRequest) -> Decision:
        """The source with the least cost, near ties and idle workers' shares as `choice` has it; goes into the log.

        Raises:
            NoCapacity: no ready worker can serve the request.
        """
        made = self._decide(request)
        self._num_decisions += 1
        self._recent.append(made)
        return made.decision

    def preview(self, request: RouteRequest) -> Decision:
        """What `route` would decide now; it remembers the request's extra_key, nothing else. Raises NoCapacity."""
        return self._decide(request).decision

    def decisions(self, *, since: int = 0) -> list[LoggedDecision]:
        """The latest decisions in order, those from number `since` on."""
        return [made.logged() for made in self._recent if made.number >= since]

    def explain(self, request: RouteRequest) -> list[LoggedCandidate]:
        """Every source that `route` would weigh, cheapest first. Changes as little as `preview`. Raises NoCapacity."""
        found = self._evaluate(request)
        return sorted(candidates(found, self._left_out(request, found)), key=lambda candidate: candidate.cost_ms)

    def predict(self, source: SourceId, request: RouteRequest) -> int | None:
        """Cached tokens to expect at one source; None where it can't be known, or can't serve the request."""
        target = next((target for target in self._roster.routable if target.source == source), None)
        if target is None:
            return None
        here = Holders.of([target], request.adapter)
        cached = self._predict(request, here, self.ingest.exact[here.columns] & here.heard)
        return int(cached[0]) if len(cached) and cached[0] != UNKNOWN else None

    def book(self, decision: Decision, *, now_s: float, whole: bool = False) -> Booking:
        """Book a decision that is about to be carried out; `whole` where the answer will come in one piece."""
        return self.load.book(
            decision.column,
            tokens=decision.uncached_tokens,
            lora_id=decision.lora_id,
            now_s=now_s,
            kv_tokens=decision.kv_tokens,
            context_tokens=decision.prompt_tokens or 0,
            num_slots=decision.num_slots,
            capacity_tokens=decision.capacity_tokens,
            whole=whole,
        )

    def least_loaded(self) -> WorkerRecord | None:
        """The ready worker with the fewest running requests."""
        if not self._roster.routable:
            return None
        return min(self._roster.routable, key=lambda target: int(self.load.running[target.column])).record

    def ready_workers(self) -> list[WorkerRecord]:
        """Workers that requests may go to."""
        return [target.record for target in self._roster.routable]

    def has_room(self, adapter: str | None, *, now_s: float, max_queue_ms: float) -> bool:
        """Whether a request could be sent somewhere and not only wait there.

        Where nobody is ready, or nobody holds the adapter, too: routing says what to do then.
        """
        holders = self._roster.holders(adapter)
        return not holders.targets or self.load.has_room(
            holders.columns,
            now_s=now_s,
            max_queue_ms=max_queue_ms,
            max_running=holders.max_running,
            capacity_tokens=holders.capacity_tokens,
        )

    def preferences(self, adapter: str, *, now_s: float) -> list[WorkerId]:
        """Ready workers that don't hold the adapter, the least loaded first: where it had best be loaded."""
        waits = {
            target.source.worker_id: self.load.wait_ms(target.column, now_s)
            for target in self._roster.routable
            if adapter not in target.record.adapters
        }
        return sorted(waits, key=lambda worker_id: waits[worker_id])

    def wants_more(self, decision: Decision, *, now_s: float) -> bool:
        """Whether another worker would serve the request sooner, with the adapter to be loaded and nothing cached."""
        assert decision.adapter is not None
        computing_ms = self.load.speed.ms(decision.column, decision.prompt_tokens or 0)
        limit_ms = decision.cost_ms - self.load.adapter_load_ms - computing_ms
        return limit_ms > 0 and any(
            self.load.wait_ms(target.column, now_s) < limit_ms
            for target in self._roster.routable
            if decision.adapter not in target.record.adapters
        )

    def lose_adapter(self, worker_id: WorkerId, adapter: str) -> None:
        """A worker's engine doesn't hold the adapter, whatever our copy of the table says; the next copy decides."""
        self._roster.lose_adapter(worker_id, adapter)

    def loaded(self, record: WorkerRecord, adapter: str) -> LoraId | None:
        """lora_id under which the worker's engine holds `adapter`, or None."""
        return record.adapters.get(adapter)

    def check(self) -> None:
        """Invariants; called at the teardown of every test."""
        self.ingest.check()
        self.load.check()
        self._roster.check()

    # -- inside --------------------------------------------------------------------------------------------------

    def _decide(self, request: RouteRequest) -> Made:
        found = self._evaluate(request)
        number = self._num_decisions
        out = self._left_out(request, found)
        i = choose(found.costs.total, found.costs.running, found.cached, out, seed=self.seed, number=number)
        return Made(number, request, self._decision(request, found, i, is_left_out=bool(out[i])), found, i, out)

    def _left_out(self, request: RouteRequest, found: Evaluation) -> NDArray[np.bool_]:
        out: NDArray[np.bool_] = left_out(
            found.cached, found.costs.running, self.load.sent(found.holders.columns, request.now_s)
        )
        return out

    def _evaluate(self, request: RouteRequest) -> Evaluation:
        holders = self._roster.holders(request.adapter)
        if request.exclude:
            holders = Holders.of(holders.targets, request.adapter, request.exclude)
        if not holders.targets:
            raise self._why_none(request)
        if request.extra_key is not None:
            self._remember_key(request.extra_key)
        exact = self.ingest.exact[holders.columns] & holders.heard
        cached = self._predict(request, holders, exact)
        costs = estimate(
            self.load,
            self._weights,
            holders.columns,
            Demand(
                now_s=request.now_s,
                num_tokens=request.num_tokens,
                cached_tokens=cached,
                output_tokens=self._output_tokens(request),
                lora_ids=holders.lora_ids,
                num_slots=holders.num_slots,
                capacity_tokens=holders.capacity_tokens,
                max_running=holders.max_running,
            ),
        )
        states = [SourceState.EXACT] * len(exact) if exact.all() else [self._state(t) for t in holders.targets]
        return Evaluation(holders, states, cached, costs)

    def _output_tokens(self, request: RouteRequest) -> float:
        """Output to expect."""
        return min(self.load.output_tokens, request.max_output_tokens or self.load.output_tokens)

    def _state(self, target: Target) -> SourceState:
        return SourceState.SYNCING if target.record.silent else self.ingest.state(target.source)

    def _predict(self, request: RouteRequest, holders: Holders, known: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Cached tokens to expect at each source; UNKNOWN where it can't be known."""
        packed = request.packed_tokens
        if packed is None:
            return np.full(len(known), UNKNOWN)
        if not holders.all_dynamo:
            known = known & [self._is_told(target) for target in holders.targets]
        limit = len(packed) // TOKEN_BYTES - 1  # the engine always computes the last token
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        return self.predictor.cached_tokens(
            packed, holders.groups, known, extra_key=request.extra_key, cache_salt=request.cache_salt, limit=limit
        )

    def _is_told(self, target: Target) -> bool:
        """Whether its hashes tell whose a block is: in the default format, base and keyed blocks look alike."""
        if target.record.form.dynamo:
            return True
        attestor = self.ingest.attestor(target.source)
        return not self._extra_keys and not (attestor is not None and attestor.has_adapters)

    def _remember_key(self, extra_key: str) -> None:
        self._extra_keys.pop(extra_key, None)
        self._extra_keys[extra_key] = None
        if len(self._extra_keys) > MAX_EXTRA_KEYS:
            del self._extra_keys[next(iter(self._extra_keys))]

    def _decision(self, request: RouteRequest, found: Evaluation, i: int, *, is_left_out: bool) -> Decision:
        target, predicted = found.holders.targets[i], found.predicted(i)
        record, source = target.record, target.source
        num_tokens = None if request.packed_tokens is None else request.num_tokens
        uncached_tokens = (num_tokens or 0) - (predicted or 0)
        cost_ms = float(found.costs.total[i])
        if is_left_out and cost_ms > found.costs.total.min():
            reason = Reason.SHARE
        else:
            reason = _reason(num_tokens, predicted, int(found.cached.max()), found.states[i])
        return Decision(
            source=source,
            url=record.report.url,
            local_rank=record.sources.index(source) if len(record.sources) > 1 else None,
            column=target.column,
            lora_id=found.holders.lora_ids[i],
            adapter=request.adapter,
            reason=reason,
            prompt_tokens=num_tokens,
            predicted_cached_tokens=predicted,
            uncached_tokens=uncached_tokens,
            kv_tokens=int(uncached_tokens + self._output_tokens(request)),
            num_slots=record.report.max_loras_per_batch,
            capacity_tokens=record.report.max_total_tokens,
            cost_ms=cost_ms,
        )

    def _why_none(self, request: RouteRequest) -> NoCapacity:
        ready = sum(record.report.state is WorkerState.READY for record in self.workers.values())
        if not ready:
            return NoCapacity(f"none of {len(self.workers)} workers is ready")
        others = [target for target in self._roster.routable if target.source.worker_id not in request.exclude]
        if request.exclude and not (others and request.adapter):
            return NoCapacity(f"{len(request.exclude)} workers failed this request and none is left")
        return AdapterNotHeld(f"adapter {request.adapter!r} is not loaded on any of {len(others)} ready workers yet")


def _reason(num_tokens: int | None, chosen: int | None, most: int, state: SourceState) -> Reason:
    """`most`: cached tokens of any candidate."""
    if num_tokens is None:
        return Reason.NOT_TOKENIZED
    if chosen is None:
        return Reason.SYNCING if state is SourceState.SYNCING else Reason.UNVERIFIED
    if most > chosen:
        return Reason.SPILL
    return Reason.CACHED_PREFIX if chosen else Reason.LEAST_LOADED
