"""A fleet of workers as the core sees it, for its tests: reports, holdings, requests, and what engines publish."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

from router.core import RouterCore
from router.cost import CostWeights
from router.cursor import SeqPayload
from router.decision import Decision, Reason, RouteRequest
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.reports import AdapterState, Holding, RankReport, TableView, WorkerReport, WorkerState

PAGE = 4
PROMPT = list(range(1, 18))
"""Four pages and the token that is always computed; too few tokens for what is cached to matter."""
LONG = list(range(1, 402))
"""A hundred pages and that token: where they are cached, it costs a tenth."""
A1, A2, B1 = LoraId("a1" * 16), LoraId("a2" * 16), LoraId("b1" * 16)


def source(worker: str, incarnation: str = "i1", rank: int = 0) -> SourceId:
    return SourceId(WorkerId(worker), Incarnation(incarnation), DpRank(rank))


def report(worker: str, incarnation: str = "i1", *, ranks: tuple[int, ...] = (0,), **fields: Any) -> WorkerReport:
    last_seq = fields.pop("last_seq", None)
    return WorkerReport(
        worker_id=WorkerId(worker),
        incarnation=Incarnation(incarnation),
        url=f"http://{worker}",
        ranks=tuple(
            RankReport(dp_rank=DpRank(r), endpoint=f"tcp://{worker}:{r}", replay_endpoint=None, last_seq=last_seq)
            for r in ranks
        ),
        **{"state": WorkerState.READY, "page_size": PAGE, **fields},
    )


def holding(worker: str, name: str, lora_id: LoraId, state: AdapterState = AdapterState.LOADED, **ids: str) -> Holding:
    return Holding(
        worker_id=WorkerId(worker),
        incarnation=Incarnation(ids.get("incarnation", "i1")),
        lora_id=lora_id,
        name=name,
        content_id=lora_id,
        state=state,
    )


def request(tokens: list[int] | None = None, **fields: Any) -> RouteRequest:
    return RouteRequest(packed_tokens=pack_tokens(PROMPT if tokens is None else tokens), **fields)


def hashes(
    tokens: list[int] | None = None,
    lora_id: LoraId | None = None,
    extra_key: str | None = None,
    salt: str | None = None,
) -> list[int]:
    namespace = Namespace.of(extra_key=extra_key, lora_id=lora_id, cache_salt=salt)
    return block_hashes(PROMPT if tokens is None else tokens, PAGE, namespace)


class Fleet:
    """A core whose workers' engines have been caught up with, and what they publish."""

    def __init__(self, seed: int = 7) -> None:
        self.core = RouterCore(CostWeights(), rng=random.Random(seed))
        self._seqs: Counter[SourceId] = Counter()
        self._versions = 0

    def start(self, *reports: WorkerReport) -> None:
        for one in reports:
            self.core.report(one)
            for rank in one.ranks:
                assert (
                    self.core.ingest.replayed(source(one.worker_id, one.incarnation, rank.dp_rank), [], now_s=0) == []
                )

    def load(self, *holdings: Holding) -> None:
        self._versions += 1
        assert self.core.update_table(TableView(epoch="e1", version=self._versions, holdings=holdings))

    def publish(self, of: SourceId, *events: dict[str, Any], dp_rank: int | None = None) -> None:
        seq, self._seqs[of] = self._seqs[of], self._seqs[of] + 1
        rank = of.dp_rank if dp_rank is None else dp_rank
        payload = msgspec.msgpack.encode([1.0, events, rank])
        assert self.core.ingest.live(of, SeqPayload(seq, payload), now_s=1.0) == []

    def store(self, of: SourceId, stored: list[int], **fields: Any) -> None:
        self.publish(of, {"type": "BlockStored", "block_hashes": stored, "medium": "GPU", **fields})

    def predicted(self, asked: RouteRequest | None = None) -> dict[str, int | None]:
        """Predicted tokens by worker, or by worker/rank past rank 0."""
        candidates = self.core.explain(asked or request())
        names = [c.worker + f"/r{c.dp_rank}" * (c.dp_rank > 0) for c in candidates]
        return dict(sorted(zip(names, [c.predicted_cached_tokens for c in candidates], strict=True)))

    def choose(self, asked: RouteRequest | None = None) -> tuple[str, Reason]:
        decision = self.core.route(asked or request())
        return decision.source.worker_id, decision.reason

    def dispatch(self, asked: RouteRequest) -> Decision:
        decision = self.core.route(asked)
        self.core.book(decision, now_s=0.0)
        return decision
