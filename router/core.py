"""RouterCore: all routing state and the decision. No IO, clock, Ray, threads; one event loop owns it.

Theory of operation. Workers report themselves (WorkerReport), the LoRA table sends whole copies of itself
(TableView), event batches go to EventIngest. `route` recomputes the hashes that each candidate's engine would
publish for the prompt, follows them in the index, and picks the least cost; `explain` shows all candidates.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from router.choice import LoggedDecision, choose, left_out
from router.cost import CostWeights, Demand, estimate
from router.decision import Candidate, Decision, Reason, RouteRequest
from router.effects import Effect
from router.errors import AdapterNotHeld, NoCapacity
from router.evaluation import Evaluation, Made
from router.hashing import TOKEN_BYTES
from router.ids import LoraId, SourceId, WorkerId
from router.ingest import EventIngest, SourceState
from router.load import Booking, LoadBook
from router.predict import Place, Predictor
from router.reports import TableView, WorkerReport, WorkerState
from router.roster import Roster, Target, WorkerRecord

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
        """What `route` would decide now. Changes nothing. Raises NoCapacity."""
        return self._decide(request).decision

    def decisions(self, *, since: int = 0) -> list[LoggedDecision]:
        """The latest decisions in order, those from number `since` on."""
        return [made.logged() for made in self._recent if made.number >= since]

    def explain(self, request: RouteRequest) -> list[Candidate]:
        """Every source that `route` would weigh, cheapest first. Changes nothing."""
        found = self._evaluate(request)
        order = np.argsort(found.costs.total, kind="stable")
        return [
            Candidate(
                source=found.targets[i].source,
                state=found.states[i],
                predicted_cached_tokens=found.predicted[i],
                cost_ms=round(float(found.costs.total[i]), 3),
                terms={name: round(ms, 3) for name, ms in found.costs.row(i).items()},
            )
            for i in order.tolist()
        ]

    def predict(self, source: SourceId, request: RouteRequest) -> int | None:
        """Cached tokens to expect at one source; None where it can't be known, or can't serve the request."""
        for target in self._roster.routable:
            if target.source == source:
                lora_id = None if request.adapter is None else self.loaded(target.record, request.adapter)
                if request.adapter is not None and lora_id is None:
                    return None
                return self._predict(request, [target], [lora_id], [self._state(target)])[0]
        return None

    def book(self, decision: Decision, *, now_s: float) -> Booking:
        """Book a decision that is about to be carried out."""
        return self.load.book(
            decision.column,
            tokens=decision.uncached_tokens,
            lora_id=decision.lora_id,
            now_s=now_s,
            kv_tokens=decision.kv_tokens,
            num_slots=decision.num_slots,
            capacity_tokens=decision.capacity_tokens,
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
        eligible = False
        for target in self._roster.routable:
            if adapter is not None and adapter not in target.record.adapters:
                continue
            eligible = True
            report = target.record.report
            if self.load.has_room(
                target.column,
                now_s=now_s,
                max_queue_ms=max_queue_ms,
                max_running=target.record.max_running,
                capacity_tokens=report.max_total_tokens,
            ):
                return True
        return not eligible

    def preferences(self, adapter: str) -> list[WorkerId]:
        """Ready workers that don't hold the adapter, the least loaded first: where it had best be loaded."""
        waits = {
            target.source.worker_id: self._wait_ms(target)
            for target in self._roster.routable
            if adapter not in target.record.adapters
        }
        return sorted(waits, key=lambda worker_id: waits[worker_id])

    def wants_more(self, decision: Decision) -> bool:
        """Whether another worker would serve the request sooner, with the adapter to be loaded and nothing cached."""
        assert decision.adapter is not None
        computing_ms = self.load.speed.ms(decision.column, decision.prompt_tokens or 0)
        limit_ms = decision.cost_ms - self.load.adapter_load_ms - computing_ms
        return limit_ms > 0 and any(
            self._wait_ms(target) < limit_ms
            for target in self._roster.routable
            if decision.adapter not in target.record.adapters
        )

    def lose_adapter(self, worker_id: WorkerId, adapter: str) -> None:
        """A worker's engine doesn't hold the adapter, whatever our copy of the table says; the next copy decides."""
        record = self.workers.get(worker_id)
        if record is not None:
            record.adapters = {name: lora_id for name, lora_id in record.adapters.items() if name != adapter}

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
        running = self.load.busy[found.columns]
        number = self._num_decisions
        out = np.zeros(len(running), bool)
        if not running.all():
            cached = np.array([tokens or 0 for tokens in found.predicted])
            out = left_out(cached, running, self.load.sent(found.columns, request.now_s))
        i = choose(found.costs.total, running, out, seed=self.seed, number=number)
        is_due = bool(out[i] and found.costs.total[i] > found.costs.total.min())
        return Made(number, request, self._decision(request, found, i, is_due=is_due), found, i, running, out)

    def _evaluate(self, request: RouteRequest) -> Evaluation:
        targets: list[Target] = []
        lora_ids: list[LoraId | None] = []
        for target in self._roster.routable:
            if target.source.worker_id in request.exclude:
                continue
            lora_id = None
            if request.adapter is not None and (lora_id := self.loaded(target.record, request.adapter)) is None:
                continue
            targets.append(target)
            lora_ids.append(lora_id)
        if not targets:
            raise self._why_none(request)
        states = [self._state(target) for target in targets]
        if request.extra_key is not None:
            self._remember_key(request.extra_key)
        predicted = self._predict(request, targets, lora_ids, states)
        num_tokens = request.num_tokens
        columns = np.array([target.column for target in targets])
        costs = estimate(
            self.load,
            self._weights,
            columns,
            Demand(
                now_s=request.now_s,
                uncached_tokens=np.array([float(num_tokens - (cached or 0)) for cached in predicted]),
                output_tokens=self._output_tokens(request),
                lora_ids=lora_ids,
                num_slots=np.array([target.record.report.max_loras_per_batch for target in targets]),
                capacity_tokens=np.array([float(t.record.report.max_total_tokens or np.inf) for t in targets]),
            ),
        )
        return Evaluation(targets, states, lora_ids, predicted, columns, costs)

    def _wait_ms(self, target: Target) -> float:
        """What is booked on a source already."""
        column = target.column
        return float(self.load.queued_ms[column]) + float(
            self.load.running[column] * self._weights.decode_ms_per_request
        )

    def _output_tokens(self, request: RouteRequest) -> float:
        """Output to expect."""
        return min(self.load.output_tokens, request.max_output_tokens or self.load.output_tokens)

    def _state(self, target: Target) -> SourceState:
        return SourceState.SYNCING if target.record.silent else self.ingest.state(target.source)

    def _predict(
        self,
        request: RouteRequest,
        targets: Sequence[Target],
        lora_ids: Sequence[LoraId | None],
        states: Sequence[SourceState],
    ) -> list[int | None]:
        """Cached tokens to expect at each source; None where it can't be known."""
        predicted: list[int | None] = [None] * len(targets)
        packed = request.packed_tokens
        if packed is None:
            return predicted
        known = [i for i, state in enumerate(states) if state is SourceState.EXACT and self._is_told(targets[i])]
        limit = len(packed) // TOKEN_BYTES - 1  # the engine always computes the last token
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        cached = self.predictor.cached_tokens(
            packed,
            [Place(targets[i].column, targets[i].record.form, lora_ids[i]) for i in known],
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            limit=limit,
        )
        for i, tokens in zip(known, cached, strict=True):
            predicted[i] = tokens
        return predicted

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

    def _decision(self, request: RouteRequest, found: Evaluation, i: int, *, is_due: bool) -> Decision:
        target, predicted = found.targets[i], found.predicted[i]
        record, source = target.record, target.source
        num_tokens = None if request.packed_tokens is None else len(request.packed_tokens) // TOKEN_BYTES
        return Decision(
            source=source,
            url=record.report.url,
            local_rank=record.sources.index(source) if len(record.sources) > 1 else None,
            column=target.column,
            lora_id=found.lora_ids[i],
            adapter=request.adapter,
            reason=Reason.SHARE if is_due else _reason(num_tokens, predicted, found.predicted, found.states[i]),
            prompt_tokens=num_tokens,
            predicted_cached_tokens=predicted,
            uncached_tokens=(num_tokens or 0) - (predicted or 0),
            kv_tokens=int((num_tokens or 0) - (predicted or 0) + self._output_tokens(request)),
            num_slots=record.report.max_loras_per_batch,
            capacity_tokens=record.report.max_total_tokens,
            cost_ms=float(found.costs.total[i]),
        )

    def _why_none(self, request: RouteRequest) -> NoCapacity:
        ready = sum(record.report.state is WorkerState.READY for record in self.workers.values())
        if not ready:
            return NoCapacity(f"none of {len(self.workers)} workers is ready")
        others = [target for target in self._roster.routable if target.source.worker_id not in request.exclude]
        if request.exclude and not (others and request.adapter):
            return NoCapacity(f"{len(request.exclude)} workers failed this request and none is left")
        return AdapterNotHeld(f"adapter {request.adapter!r} is not loaded on any of {len(others)} ready workers yet")


def _reason(num_tokens: int | None, chosen: int | None, predicted: Sequence[int | None], state: SourceState) -> Reason:
    if num_tokens is None:
        return Reason.NOT_TOKENIZED
    if chosen is None:
        return Reason.SYNCING if state is SourceState.SYNCING else Reason.UNVERIFIED
    best = max(cached or 0 for cached in predicted)
    if best > chosen:
        return Reason.SPILL
    return Reason.CACHED_PREFIX if chosen else Reason.LEAST_LOADED
