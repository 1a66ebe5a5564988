"""Audit: is the index what the workers' mirrors hold, and are the mirrors what the engines do? Anytime, while serving.

Comparison: a worker's snapshot is the state after some batch; the batches that this router has applied since are
applied to it as well, and then both must be the same multiset of blocks. What differs is a ghost (here, not there) or
missing (there, not here). Probe: a prompt that was served lately is asked of the engine again, one page longer than
what is predicted; what the engine then says it had cached must be the prediction.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import zmq.asyncio

from router.core import RouterCore
from router.cursor import SeqPayload
from router.decision import RouteRequest
from router.events import Cleared, Removed, Tier, decode_batch
from router.hashing import TOKEN_BYTES
from router.ids import SourceId
from router.index import BlockIndex
from router.ingest import SourceState
from router.net.engine_probe import ProbeError
from router.net.snapshots import ask_snapshot, snapshot_blocks
from router.table import Hashes

log = logging.getLogger(__name__)

_CATCH_UP_S: Final = 5.0
_LATE_LOOK_S: Final = 0.1
_LATE_S: Final = 5.0
"""Heartbeats tell within two of them what the wire has lost."""
_LOOK_S: Final = 0.005
_TRIES: Final = 3


class Verdict(StrEnum):
    """Outcome of one source's audit."""

    CLEAN = "clean"
    DIRTY = "dirty"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Probe:
    """One prompt asked of an engine: what the index said, and what the engine did."""

    tokens: int
    predicted: int
    actual: int


@dataclass(slots=True)
class SourceAudit:
    """What was found of one source. Counts are blocks, a block as often as it is held."""

    source: SourceId
    verdict: Verdict
    why: str = ""
    seq: int | None = None
    """Last batch that both sides had applied."""
    blocks: int = 0
    ghosts: int = 0
    missing: int = 0
    probes: list[Probe] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "worker": self.source.worker_id,
            "incarnation": self.source.incarnation,
            "dp_rank": self.source.dp_rank,
            "verdict": self.verdict.value,
            "why": self.why,
            "seq": self.seq,
            "blocks": self.blocks,
            "ghosts": self.ghosts,
            "missing": self.missing,
            "probes": [{"tokens": p.tokens, "predicted": p.predicted, "actual": p.actual} for p in self.probes],
        }


class _InconclusiveError(Exception):
    """Nothing can be said now; the message says why."""


AskEngine = Callable[[SourceId, RouteRequest], Awaitable[int]]
"""Cached tokens that the engine of a source reports for a prompt; raises ProbeError."""


class Auditor:
    """Lives on the core's loop."""

    def __init__(
        self,
        core: RouterCore,
        context: zmq.asyncio.Context,
        *,
        ask_engine: AskEngine,
        samples: Sequence[RouteRequest],
    ) -> None:
        """`samples`: requests that were served lately, for probes to choose from; a live view."""
        self._core = core
        self._context = context
        self._ask_engine = ask_engine
        self._rng = random.Random()
        #: one audit at a time: a source has one journal
        self._lock = asyncio.Lock()
        self._samples = samples

    async def audit(self, source: SourceId, *, num_probes: int = 1) -> SourceAudit:
        """Compare one source, and probe its engine with up to `num_probes` sampled prompts."""
        async with self._lock:
            return await self._audit(source, num_probes)

    async def _audit(self, source: SourceId, num_probes: int) -> SourceAudit:
        try:
            found = await self._compared(source)
            if found.verdict is Verdict.CLEAN:
                found.probes = await self._probed(source, num_probes)
                if any(probe.predicted != probe.actual for probe in found.probes):
                    found.verdict, found.why = Verdict.DIRTY, "the engine's cache isn't what its events told"
        except _InconclusiveError as exc:
            return SourceAudit(source, Verdict.INCONCLUSIVE, str(exc))
        return found

    # -- index and mirror ----------------------------------------------------------------------------------------

    async def _compared(self, source: SourceId) -> SourceAudit:
        why = ""
        for _ in range(_TRIES):
            try:
                return await self._compare(source)
            except _InconclusiveError as exc:
                why = str(exc)
        raise _InconclusiveError(why)

    async def _compare(self, source: SourceId) -> SourceAudit:
        ingest = self._core.ingest
        self._check_exact(source)
        record = self._core.workers[source.worker_id]
        ingest.start_journal(source)
        first_seq = ingest.cursor(source).next_seq
        try:
            snapshot = await ask_snapshot(self._context, record.report.snapshot_endpoint, source)
            scratch = await asyncio.to_thread(_scratch, source, snapshot_blocks(snapshot))
            await self._catch_up(source, snapshot.last_seq)
        except TimeoutError as exc:
            raise _InconclusiveError(f"no snapshot: {exc}") from exc
        finally:
            journal = ingest.stop_journal(source)
        self._check_exact(source)
        if journal is None or snapshot.last_seq + 1 < first_seq:
            raise _InconclusiveError("the mirror was behind, or too much came meanwhile")
        _apply(scratch, source, [batch for batch in journal if batch.seq > snapshot.last_seq])
        seq, ours = ingest.cursor(source).next_seq - 1, ingest.index.export(source)
        ghosts, missing = await asyncio.to_thread(_differences, ours, scratch.export(source))
        found = SourceAudit(source, Verdict.CLEAN, seq=seq, blocks=sum(map(len, ours.values())))
        found.ghosts, found.missing = ghosts, missing
        if ghosts or missing:
            found.verdict, found.why = Verdict.DIRTY, "the index isn't what the worker's mirror holds"
        return found

    def _check_exact(self, source: SourceId) -> None:
        ingest = self._core.ingest
        if source not in ingest:
            raise _InconclusiveError("the source is gone")
        if ingest.state(source) is not SourceState.EXACT:
            raise _InconclusiveError(f"it is {ingest.state(source)} {ingest.fault(source)}".rstrip())

    async def _catch_up(self, source: SourceId, seq: int) -> None:
        until_s = time.monotonic() + _CATCH_UP_S
        while source in self._core.ingest and self._core.ingest.cursor(source).next_seq <= seq:
            if time.monotonic() > until_s:
                raise _InconclusiveError(f"batch {seq} of the mirror didn't come within {_CATCH_UP_S:.0f} s")
            await asyncio.sleep(_LOOK_S)

    # -- index and engine ----------------------------------------------------------------------------------------

    async def _probed(self, source: SourceId, num_probes: int) -> list[Probe]:
        samples = [sample for sample in self._samples if sample.max_cached_tokens is None]
        self._rng.shuffle(samples)
        probes: list[Probe] = []
        for sample in samples:
            if len(probes) >= num_probes:
                break
            probe = await self._probe(source, sample)
            if probe is not None:
                probes.append(probe)
        return probes

    async def _probe(self, source: SourceId, sample: RouteRequest) -> Probe | None:
        """None where the source can't serve the sample, or its cache changed while it was asked."""
        ingest = self._core.ingest
        for _ in range(_TRIES):
            if source not in ingest or (whole := self._core.predict(source, sample)) is None:
                return None
            page_size = self._core.workers[source.worker_id].report.page_size
            packed = (sample.packed_tokens or b"")[: (whole + page_size + 1) * TOKEN_BYTES]
            asked = replace(sample, packed_tokens=packed)
            predicted = self._core.predict(source, asked)
            ingest.start_journal(source)
            try:
                actual = await self._ask_engine(source, asked)
            except ProbeError as exc:
                raise _InconclusiveError(f"the engine can't be probed: {exc}") from exc
            finally:
                journal = ingest.stop_journal(source)
            if predicted is None or journal is None or _shrank(journal):
                continue
            if predicted == actual or not await self._is_late(source, asked, predicted, actual):
                return Probe(len(packed) // TOKEN_BYTES, predicted, actual)
        return None

    async def _is_late(self, source: SourceId, asked: RouteRequest, predicted: int, actual: int) -> bool:
        """Whether batches that came after the answer tell of the difference: the wire may have lost them at first, and
        heartbeats and replays bring them again."""
        ingest = self._core.ingest
        until_s = time.monotonic() + _LATE_S
        ingest.start_journal(source)
        try:
            while time.monotonic() < until_s:
                await asyncio.sleep(_LATE_LOOK_S)
                if source in ingest and predicted < actual <= (self._core.predict(source, asked) or 0):
                    return True
        finally:
            journal = ingest.stop_journal(source)
        self._check_exact(source)
        return journal is None or _shrank(journal)


def _scratch(source: SourceId, blocks: Mapping[Tier, Hashes]) -> BlockIndex:
    index = BlockIndex()
    index.add(source)
    index.restore(source, blocks)
    return index


def _apply(index: BlockIndex, source: SourceId, batches: Sequence[SeqPayload]) -> None:
    for batch in batches:
        index.apply(source, decode_batch(batch.payload).events)


def _shrank(batches: Sequence[SeqPayload]) -> bool:
    return any(isinstance(event, Removed | Cleared) for b in batches for event in decode_batch(b.payload).events)


def _differences(ours: Mapping[Tier, Hashes], theirs: Mapping[Tier, Hashes]) -> tuple[int, int]:
    """Blocks only here, and blocks only there; copies count."""
    none = np.zeros(0, np.uint64)
    ghosts = missing = 0
    for tier in {*ours, *theirs}:
        here, there = ours.get(tier, none), theirs.get(tier, none)
        keys, inverse = np.unique(np.concatenate((here, there)), return_inverse=True)
        surplus = np.bincount(inverse[: len(here)], minlength=len(keys)) - np.bincount(
            inverse[len(here) :], minlength=len(keys)
        )
        ghosts += int(surplus[surplus > 0].sum())
        missing -= int(surplus[surplus < 0].sum())
    return ghosts, missing
