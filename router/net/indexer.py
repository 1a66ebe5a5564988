"""The index as a service for any SGLang servers: who holds how much of a prompt. No Ray, no requests, no load.

Servers are told to it (`register`); nobody sends heartbeats, so a LifeWatch looks after them. One roster entry a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from router.effects import Effect, Subscribe, Unsubscribe
from router.errors import InvalidRequest, UnknownWorker
from router.hashing import pack_tokens
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.ingest import EventIngest, SourceState
from router.load import LoadBook
from router.net.lifewatch import LifeWatch
from router.net.snapshots import fetch_snapshot
from router.net.subscriber import EventSubscriber, NoSnapshotError
from router.predict import Place, Predictor, grouped
from router.reports import AdapterState, Holding, RankReport, TableView, WorkerReport, WorkerState
from router.roster import Roster

log = logging.getLogger(__name__)

_UNUSED_RATE: Final = 1.0
"""The load book wants a prefill rate; nothing is ever booked here."""
Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://[^*/\s]+:[0-9]{1,5}|ipc://.+)$")]
"""As ZMQ connects to it, tcp://host:port or ipc://path; not as a server binds it, tcp://*:port."""


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of a server, as it is told to us."""

    worker_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    endpoint: Endpoint
    incarnation: str = ""
    """Its present life, where somebody knows: another one voids the former. Snapshots are asked for under it."""
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    replay_endpoint: Endpoint | None = None
    snapshot_endpoint: Endpoint | None = None
    """A loray worker's mirror; without it, what the replay socket has lost can't be had."""
    page_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """Tokens a block; 0: the first store event tells."""
    bigram: bool = False
    """Whether it hashes pairs of tokens (speculative decoding)."""
    dynamo: bool = True
    """Whether its kv-events-config says `"format": "dynamo"`."""
    adapters: dict[str, LoraId] | None = None
    """lora_id by name, as its engine knows them; None leaves what is known of the worker."""


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose prefix is it?"""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]]
    adapter: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None


@dataclass(slots=True)
class _Entry:
    """A registered rank in its present life."""

    registration: Registration
    source: SourceId
    #: lives seen since it was registered; a snapshot can be had of the first only
    life: int = 1


class Indexer:
    """Lives on one event loop. `run` watches until cancelled."""

    def __init__(self, *, max_index_bytes: int | None = None) -> None:
        self.ingest = EventIngest(max_bytes=max_index_bytes)
        self._predictor = Predictor(self.ingest.index)
        self._roster = Roster(self.ingest, LoadBook(prefill_tokens_per_s=_UNUSED_RATE), extra_keys=())
        self._subscriber = EventSubscriber(
            self.ingest, fetch_snapshot=self._fetch_snapshot, on_disconnect=self._disconnected
        )
        self._watch = LifeWatch(
            self.ingest, on_restart=self._restarted, on_silence=self._silent, perform=self._subscriber.perform
        )
        #: by (worker_id, dp_rank)
        self._entries: dict[tuple[str, int], _Entry] = {}
        self._table_version = 0

    async def run(self) -> None:
        """Look after the sources."""
        await self._watch.run(self._subscriber.context)

    async def close(self) -> None:
        """Let all sockets go."""
        await self._subscriber.close()

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """Follow a rank. The same again changes nothing; anything else of the same rank starts it from nothing.

        Another incarnation voids all ranks of the worker. Raises InvalidRequest.
        """
        worker_id, key = registration.worker_id, (registration.worker_id, registration.dp_rank)
        for other in [other for other in self._entries if other[0] == worker_id]:
            known = self._entries[other].registration
            same = msgspec.structs.replace(known, adapters=None) == msgspec.structs.replace(registration, adapters=None)
            if known.incarnation != registration.incarnation or (other == key and not same):
                self._forget(other)
        if key not in self._entries:
            roster_id = WorkerId(f"{worker_id}/{registration.dp_rank}")
            source = SourceId(roster_id, Incarnation(registration.incarnation), DpRank(registration.dp_rank))
            self._entries[key] = _Entry(registration, source)
            try:
                self._begin(self._entries[key])
            except zmq.ZMQError as exc:
                self._forget(key)
                raise InvalidRequest(f"{registration.endpoint} is nothing to connect to: {exc}") from exc
        others = (entry.registration.adapters for entry in self._of(worker_id))
        known_adapters = next((adapters for adapters in others if adapters is not None), {})
        self.set_adapters(worker_id, known_adapters if registration.adapters is None else registration.adapters)

    def set_adapters(self, worker_id: str, adapters: dict[str, LoraId]) -> None:
        """What the worker's engine holds now. Raises UnknownWorker."""
        entries = self._of(worker_id)
        for entry in entries:
            entry.registration = msgspec.structs.replace(entry.registration, adapters=adapters)
        self._table_version += 1
        self._roster.update_table(TableView(epoch="", version=self._table_version, holdings=tuple(self._holdings())))

    def remove(self, worker_id: str) -> None:
        """Forget all of a worker. Raises UnknownWorker."""
        for entry in self._of(worker_id):
            self._forget((worker_id, entry.registration.dp_rank))

    # -- questions -----------------------------------------------------------------------------------------------

    def query(self, query: Query) -> dict[str, Any]:
        """For every worker its best rank: tokens of full pages that it is known to hold, from the start of the prompt.

        0 where nothing is known (`syncing`, or a fault); a lower bound where old events are missing (`unverified`).
        """
        packed = pack_tokens(query.token_ids)
        entries = list(self._entries.values())
        asked: list[tuple[_Entry, Place]] = []
        for entry in entries:
            adapters = entry.registration.adapters or {}
            if query.adapter is not None and query.adapter not in adapters:
                continue
            attestor = self.ingest.attestor(entry.source)
            assert attestor is not None
            if not attestor.form.dynamo and (attestor.has_adapters or query.extra_key is not None):
                continue  # whose a block is, its hash doesn't tell
            lora_id = None if query.adapter is None else adapters[query.adapter]
            asked.append((entry, Place(self.ingest.column(entry.source), attestor.form, lora_id)))
        found = self._predictor.cached_tokens(
            packed,
            grouped([place for _, place in asked]),
            np.ones(len(asked), bool),
            extra_key=query.extra_key,
            cache_salt=query.cache_salt,
        )
        cached = {id(entry): max(0, tokens) for (entry, _), tokens in zip(asked, found.tolist(), strict=True)}
        workers: dict[str, Any] = {}
        for entry in entries:
            state = self._state(entry)
            believed = state is SourceState.EXACT or (
                state is SourceState.UNVERIFIED and self.ingest.is_partial(entry.source)
            )
            tokens = cached.get(id(entry), 0) if believed else 0
            worker_id, rank = entry.registration.worker_id, entry.registration.dp_rank
            if worker_id not in workers or tokens > workers[worker_id]["cached_tokens"]:
                workers[worker_id] = {"cached_tokens": tokens, "state": state.value, "dp_rank": rank}
        return {"workers": workers}

    def workers(self) -> dict[str, Any]:
        """All that is known of every worker, as JSON values."""
        found: dict[str, Any] = {}
        for entry in self._entries.values():
            registration, source = entry.registration, entry.source
            attestor = self.ingest.attestor(source)
            stats, cursor = self.ingest.stats(source), self.ingest.cursor(source)
            worker = found.setdefault(
                registration.worker_id,
                {"incarnation": registration.incarnation, "adapters": registration.adapters or {}, "ranks": []},
            )
            worker["ranks"].append({
                "dp_rank": registration.dp_rank,
                "state": self._state(entry).value,
                "fault": self.ingest.fault(source),
                "silent": self._roster.workers[source.worker_id].silent,
                "endpoint": registration.endpoint,
                "page_size": attestor.form.page_size if attestor else 0,
                "blocks": self.ingest.index.num_copies(source),
                "next_seq": cursor.next_seq,
                "duplicates": cursor.duplicates,
                "gaps": cursor.gaps,
                "restarts": entry.life - 1,
                "bad_events": stats.bad,
            })  # fmt: skip
        return {"workers": found, "index_bytes": self.ingest.index.size_bytes}

    # -- inside --------------------------------------------------------------------------------------------------

    def _of(self, worker_id: str) -> list[_Entry]:
        entries = [entry for (known, _), entry in self._entries.items() if known == worker_id]
        if not entries:
            listed = ", ".join(sorted({known for known, _ in self._entries})) or "none"
            raise UnknownWorker(f"worker {worker_id!r} isn't registered; registered: {listed}")
        return entries

    def _state(self, entry: _Entry) -> SourceState:
        silent = self._roster.workers[entry.source.worker_id].silent
        return SourceState.SYNCING if silent else self.ingest.state(entry.source)

    def _begin(self, entry: _Entry) -> None:
        self._perform(self._roster.report(_report(entry)))

    def _forget(self, key: tuple[str, int]) -> None:
        entry = self._entries.pop(key)
        self._perform(self._roster.forget(entry.source.worker_id))

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Subscribe():
                    self._watch.add(effect.source, effect.replay_endpoint)
                case Unsubscribe():
                    self._watch.discard(effect.source)
            self._subscriber.perform([effect])

    def _entry(self, source: SourceId) -> _Entry | None:
        return next((entry for entry in self._entries.values() if entry.source == source), None)

    def _restarted(self, source: SourceId) -> None:
        entry = self._entry(source)
        if entry is None:
            return
        entry.life += 1
        given = entry.registration.incarnation
        entry.source = source._replace(incarnation=Incarnation(f"{given}#{entry.life}"))
        self._begin(entry)
        self.set_adapters(entry.registration.worker_id, entry.registration.adapters or {})

    def _silent(self, source: SourceId, silent: bool) -> None:
        entry = self._entry(source)
        if entry is None:
            return
        if silent:
            self._roster.silence(source.worker_id)
        elif self._roster.workers[source.worker_id].silent:
            self._perform(self._roster.report(_report(entry)))

    def _disconnected(self, source: SourceId) -> None:
        self._watch.disconnected(source)

    def _holdings(self) -> Iterable[Holding]:
        for entry in self._entries.values():
            for name, lora_id in (entry.registration.adapters or {}).items():
                yield Holding(
                    worker_id=entry.source.worker_id,
                    incarnation=entry.source.incarnation,
                    lora_id=lora_id,
                    name=name,
                    content_id="",
                    state=AdapterState.LOADED,
                )

    async def _fetch_snapshot(self, context: zmq.asyncio.Context, source: SourceId) -> list[Effect]:
        entry = self._entry(source)
        if entry is None:
            raise TimeoutError("it was removed")
        endpoint = entry.registration.snapshot_endpoint
        if endpoint is None or entry.life > 1:
            raise NoSnapshotError
        return await fetch_snapshot(context, endpoint, source, self.ingest)


def _report(entry: _Entry) -> WorkerReport:
    registration = entry.registration
    rank = RankReport(
        dp_rank=entry.source.dp_rank,
        endpoint=registration.endpoint,
        replay_endpoint=registration.replay_endpoint,
    )
    return WorkerReport(
        worker_id=entry.source.worker_id,
        incarnation=entry.source.incarnation,
        state=WorkerState.READY,
        ranks=(rank,),
        page_size=registration.page_size,
        bigram=registration.bigram,
        dynamo_format=registration.dynamo,
    )
