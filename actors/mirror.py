"""A worker's mirror of what its own engine holds, so that a router that missed events can start from it."""

from __future__ import annotations

import asyncio
import logging

from router.attestation import Attestor, HashForm
from router.effects import Subscribe
from router.ids import DpRank, SourceId
from router.ingest import EventIngest, SourceState
from router.net.lifewatch import LifeWatch
from router.net.snapshots import take_snapshot
from router.net.subscriber import EventSubscriber
from router.reports import RankReport, Snapshot, SnapshotRequest

log = logging.getLogger(__name__)


class Mirror:
    """Follows the ranks of one engine life. Lives on the worker's loop."""

    def __init__(self, sources: list[SourceId], ranks: list[RankReport], form: HashForm) -> None:
        """`sources` and `ranks` run parallel; `form` as the engine's settings say."""
        self._ingest = EventIngest()
        self._subscriber = EventSubscriber(self._ingest)
        #: finds what was lost last: the mirror hears no heartbeat, it is what the heartbeat tells of
        self._watch = LifeWatch(
            self._ingest,
            on_restart=lambda source: log.error("%s: its stream started over", source),
            on_silence=lambda _source, _silent: None,
            perform=self._subscriber.perform,
        )
        self._sources = {source.dp_rank: source for source in sources}
        #: nobody uses extra keys before the engine is known, so that the first hash must be ours
        self._attestors = {source.dp_rank: Attestor(form, max_unexplained=1) for source in sources}
        for source, rank in zip(sources, ranks, strict=True):
            self._ingest.add(source, self._attestors[source.dp_rank])
            self._subscriber.perform([Subscribe(source, rank.endpoint, rank.replay_endpoint)])
            self._watch.add(source, rank.replay_endpoint)
        self._watching = asyncio.ensure_future(self._watch.run(self._subscriber.context))

    @property
    def dp_ranks(self) -> list[DpRank]:
        """All ranks, in the engine's order."""
        return list(self._sources)

    def last_seq(self, dp_rank: DpRank) -> int | None:
        """Last batch seen of a rank, None before the first or while unsure."""
        source = self._sources[dp_rank]
        if self._ingest.state(source) is not SourceState.EXACT:
            return None
        return self._ingest.cursor(source).next_seq - 1 if self._ingest.cursor(source).next_seq else None

    def num_blocks(self, dp_rank: DpRank) -> int:
        """Blocks held on GPU."""
        return self._ingest.index.num_blocks(self._sources[dp_rank])

    def is_attested(self, dp_rank: DpRank) -> bool:
        """Whether a block of the base model had the hash that we compute."""
        return self._attestors[dp_rank].num_attested > 0

    def fault(self, dp_rank: DpRank) -> str:
        """Why the rank's events can't be predicted from; empty for no reason."""
        return self._attestors[dp_rank].fault

    def has_hole(self) -> bool:
        """Whether batches are missing that not even the engine has: only an emptied cache makes up for them."""
        states = [self._ingest.state(source) for source in self._sources.values()]
        return SourceState.UNVERIFIED in states and not any(map(self.fault, self._sources))

    def snapshot(self, request: SnapshotRequest) -> Snapshot:
        """Answer to a router."""
        source = self._sources.get(request.dp_rank)
        if source is None or source.incarnation != request.incarnation:
            error = f"this worker serves {sorted(map(str, self._sources.values()))}"
            return Snapshot(
                incarnation=request.incarnation, dp_rank=request.dp_rank, last_seq=-1, blocks={}, error=error
            )
        return take_snapshot(self._ingest, source)

    async def close(self) -> None:
        """Stop following."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._subscriber.close()
