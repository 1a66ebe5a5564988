"""The indexer service over HTTP, with servers that nobody reports on: what it can't know it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import pytest
import zmq

from router.net.indexer import Indexer
from router.net.indexer_http import IndexerServer
from tests.conformance.event_truth.engine import ADAPTERS, PAGE, TruthEngine, silent_socket
from tests.conformance.event_truth.fleet import TruthWorker, eventually
from tests.ports import free_port

P = list(range(100, 124))
Q = list(range(200, 216))
R = list(range(300, 316))


class Service:
    """An indexer and a client of it."""

    def __init__(self) -> None:
        self.indexer = Indexer()
        self._port = free_port()
        self._server = IndexerServer(self.indexer, host="127.0.0.1", port=self._port)
        self._session: aiohttp.ClientSession

    async def start(self) -> None:
        await self._server.start()
        self._session = aiohttp.ClientSession(f"http://127.0.0.1:{self._port}")

    async def stop(self) -> None:
        self.indexer.ingest.check()
        await self._session.close()
        await self._server.stop()

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.request(method, path, json=body) as answer:
            return answer.status, await answer.json()

    async def register(self, engine: TruthEngine, worker_id: str = "w0", **fields: Any) -> None:
        body = {
            "worker_id": worker_id,
            "endpoint": engine.endpoint,
            "replay_endpoint": engine.replay_endpoint,
            "page_size": PAGE,
            "adapters": ADAPTERS,
            **fields,
        }
        body = {name: value for name, value in body.items() if value is not None}
        status, answer = await self.call("POST", "/workers", body)
        assert status == 201, answer

    async def answer(self, tokens: Sequence[int], worker_id: str = "w0", **fields: Any) -> tuple[int, str]:
        status, body = await self.call("POST", "/query", {"token_ids": list(tokens), **fields})
        assert status == 200, body
        worker = body["workers"][worker_id]
        return worker["cached_tokens"], worker["state"]

    async def rank(self, worker_id: str = "w0") -> dict[str, Any]:
        _, body = await self.call("GET", "/workers")
        ranks: list[dict[str, Any]] = body["workers"][worker_id]["ranks"]
        return ranks[0]

    async def becomes(
        self, tokens: Sequence[int], expected: Callable[[], int], state: str = "exact", **fields: Any
    ) -> None:
        """Until the answer is what the tree says, in that state."""
        seen: list[tuple[int, str]] = []

        async def look() -> None:
            while True:
                seen.append(await self.answer(tokens, **fields))
                if seen[-1] == (expected(), state):
                    return

        try:
            await asyncio.wait_for(look(), 20)
        except TimeoutError:
            raise AssertionError(f"{seen[-1]} isn't {(expected(), state)}") from None


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
def engine() -> Any:
    engine = TruthEngine()
    yield engine
    engine.stop()


async def test_a_server_is_followed_from_its_replay_and_answers_for_each_namespace(
    service: Service, engine: TruthEngine
) -> None:
    engine.store(P)
    engine.store(Q, adapter="ad-a")
    await service.register(engine)
    await service.becomes(P, lambda: engine.cached(P))
    await service.becomes(Q, lambda: engine.cached(Q, adapter="ad-a"), adapter="ad-a")
    engine.store(R, salt="s", extra="x")
    engine.evict(8)
    await service.becomes(R, lambda: engine.cached(R, salt="s", extra="x"), cache_salt="s", extra_key="x")
    await service.becomes(P, lambda: engine.cached(P))
    assert await service.answer(Q) == (engine.cached(Q), "exact")
    assert await service.answer(P, adapter="nobody") == (0, "exact")


async def test_every_full_page_counts_even_that_of_the_last_token(service: Service, engine: TruthEngine) -> None:
    engine.store(P)
    await service.register(engine)
    await service.becomes(P, lambda: 24)
    assert await service.answer(P[:23]) == (20, "exact")


async def test_a_page_size_that_nobody_says_is_learned(service: Service, engine: TruthEngine) -> None:
    engine.store(P)
    await service.register(engine, page_size=None)
    await service.becomes(P, lambda: 24)
    assert (await service.rank())["page_size"] == PAGE


async def test_another_page_size_is_said_with_both_values(service: Service, engine: TruthEngine) -> None:
    engine.store(P)
    await service.register(engine, page_size=8)
    await service.becomes(P, lambda: 0, "unverified")
    assert (await service.rank())["fault"] == "its events say page size 4, it was registered with 8"


async def test_a_restart_that_nobody_tells_is_found(service: Service, engine: TruthEngine) -> None:
    engine.store(P)
    await service.register(engine)
    await service.becomes(P, lambda: 24)
    engine.restart()
    await service.becomes(P, lambda: 0)
    engine.store(Q)
    await service.becomes(Q, lambda: 16)
    assert (await service.answer(P), (await service.rank())["restarts"]) == ((0, "exact"), 1)


async def test_a_restart_hidden_by_a_seq_that_has_passed_the_old_is_found(
    service: Service, engine: TruthEngine
) -> None:
    engine.store(P)
    await service.register(engine)
    await service.becomes(P, lambda: 24)
    before = engine.published
    engine.restart()
    for start in range(before + 5):
        engine.store([1000 + start * 4 + i for i in range(4)])
    engine.store(Q)
    await service.becomes(Q, lambda: 16)
    assert await service.answer(P) == (0, "exact")
    assert await service.answer([1000, 1001, 1002, 1003]) == (4, "exact")


async def test_without_a_replay_socket_a_lost_connection_is_another_life(service: Service, engine: TruthEngine) -> None:
    engine.store(Q)
    worker = TruthWorker("w0", [engine])
    await worker.settled()  # what it published first is out, and nobody listened
    await worker.close_all_but_engines()
    await service.register(engine, replay_endpoint=None)

    def heard() -> bool:
        engine.publish([])
        return bool(service.indexer.workers()["workers"]["w0"]["ranks"][0]["next_seq"] > 0)

    await eventually(heard, what="the stream is heard")
    assert await service.answer(Q) == (0, "unverified")
    engine.clear()
    engine.store(P)
    await service.becomes(P, lambda: 24)
    engine.restart()
    await service.becomes(P, lambda: 0, "unverified")


async def test_a_lost_last_batch_is_found_by_looking(service: Service, engine: TruthEngine) -> None:
    worker = TruthWorker("w0", [engine])
    [wire] = worker.wires
    await service.register(engine, endpoint=wire.endpoint)
    await asyncio.to_thread(wire.connect)
    wire.fate = lambda _seq: 0
    engine.store(P)
    await service.becomes(P, lambda: 24)
    await worker.close()


async def test_a_ring_that_starts_late_leaves_a_lower_bound_until_the_next_clear(service: Service) -> None:
    engine = TruthEngine(buffer_steps=2)
    for tokens in (P, Q, R):
        engine.store(tokens)
    await service.register(engine)
    await service.becomes(R, lambda: 16, "unverified")
    assert await service.answer(P) == (0, "unverified")
    engine.store([*R, 9, 9, 9, 9])
    await service.becomes([*R, 9, 9, 9, 9], lambda: 20, "unverified")
    engine.clear()
    engine.store(P)
    await service.becomes(P, lambda: 24)
    engine.stop()


async def test_a_ring_that_starts_late_is_made_up_for_by_a_snapshot(service: Service) -> None:
    engine = TruthEngine(buffer_steps=1)
    engine.store(P)
    worker = TruthWorker("w0", [engine])
    for tokens in (Q, R):
        await worker.settled()
        engine.store(tokens)
    await worker.settled()
    await service.register(engine, incarnation=worker.incarnation, snapshot_endpoint=worker.report().snapshot_endpoint)
    for tokens in (P, Q, R):
        await service.becomes(tokens, lambda tokens=tokens: len(tokens))  # type: ignore[misc]  # bound here
    await worker.close()


async def test_a_server_that_answers_no_more_is_claimed_no_more(service: Service, engine: TruthEngine) -> None:
    engine.store(P)
    await service.register(engine)
    await service.becomes(P, lambda: 24)
    engine.stop()
    await service.becomes(P, lambda: 0, "syncing")


async def test_a_silent_replay_socket_holds_up_nobody_else(service: Service, engine: TruthEngine) -> None:
    other = TruthEngine()
    other.store(Q)
    with silent_socket() as silent:
        await service.register(engine, worker_id="w0", replay_endpoint=silent)
        await service.register(other, worker_id="w1")
        await service.becomes(Q, lambda: 16, worker_id="w1")
        assert (await service.answer(Q))[1] == "syncing"
    other.stop()


async def test_a_server_that_stands_still_as_it_is_registered_is_exact_afterwards(
    service: Service, engine: TruthEngine
) -> None:
    """Two seconds of silence don't mean that nobody has its batches."""
    engine.stop()
    with silent_socket() as silent:
        await service.register(engine, replay_endpoint=silent)
        await eventually(lambda: bool(service.indexer._subscriber._unanswered), what="a replay that wasn't answered")
    engine.replay_endpoint = silent
    engine.start()
    engine.store(P)
    await service.becomes(P, lambda: 24)


async def test_a_server_that_leaves_while_all_are_looked_at_ends_no_watch(
    service: Service, engine: TruthEngine
) -> None:
    await service.register(engine)
    watch, context = service.indexer._watch, service.indexer._subscriber.context
    [(source, endpoint)] = watch._endpoints.items()
    await service.call("DELETE", "/workers/w0")
    await watch._look(context, source, endpoint or "")


async def test_more_servers_can_be_followed_than_zmq_has_sockets_for_by_itself(service: Service) -> None:
    assert service.indexer._subscriber.context.get(zmq.MAX_SOCKETS) > 4 * 10_000


async def test_adapters_change_and_workers_leave(service: Service, engine: TruthEngine) -> None:
    engine.store(P, adapter="ad-a")
    await service.register(engine)
    await service.becomes(P, lambda: 24, adapter="ad-a")
    assert await service.call("PUT", "/workers/w0/adapters", {"ad-a": "c" * 32}) == (
        200,
        {"adapters": {"ad-a": "c" * 32}},
    )
    assert await service.answer(P, adapter="ad-a") == (0, "exact")
    assert (await service.call("PUT", "/workers/w0/adapters", {"adapters": ADAPTERS}))[0] == 200
    assert await service.answer(P, adapter="ad-a") == (24, "exact")
    assert await service.call("DELETE", "/workers/w0") == (200, {"removed": "w0"})
    assert await service.call("POST", "/query", {"token_ids": P}) == (200, {"workers": {}})
    engine.store(Q)
    assert (await service.call("GET", "/workers"))[1]["workers"] == {}


async def test_the_same_registration_again_changes_nothing_and_another_incarnation_voids(
    service: Service, engine: TruthEngine
) -> None:
    engine.store(P)
    await service.register(engine, incarnation="i1")
    await service.becomes(P, lambda: 24)
    await service.register(engine, incarnation="i1")
    assert await service.answer(P) == (24, "exact")
    engine.restart()
    await service.register(engine, incarnation="i2")
    await service.becomes(P, lambda: 0)


async def test_the_best_rank_of_a_worker_answers_for_it(service: Service) -> None:
    engines = [TruthEngine(dp_rank=rank) for rank in (0, 1)]
    engines[1].store(P)
    for engine in engines:
        await service.register(engine, dp_rank=engine.dp_rank)
    await service.becomes(P, lambda: 24)
    _, body = await service.call("POST", "/query", {"token_ids": P})
    assert body["workers"]["w0"]["dp_rank"] == 1
    for engine in engines:
        engine.stop()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("POST", "/workers", {"worker_id": "w0"}, 400, "endpoint"),
        ("POST", "/workers", {"worker_id": "", "endpoint": "tcp://127.0.0.1:1"}, 400, "worker_id"),
        ("POST", "/workers", {"worker_id": "w0", "endpoint": "127.0.0.1:1"}, 400, "endpoint"),
        ("POST", "/workers", {"worker_id": "w0", "endpoint": "tcp://127.0.0.1:1", "colour": 1}, 400, "colour"),
        ("POST", "/workers", {"worker_id": "w0", "endpoint": "tcp://127.0.0.1:1", "page_size": -1}, 400, "page_size"),
        ("POST", "/query", {"token_ids": [1, -2]}, 400, "token_ids"),
        ("POST", "/query", {"token_ids": [1 << 32]}, 400, "token_ids"),
        ("POST", "/query", {"tokens": [1]}, 400, "tokens"),
        ("POST", "/query", "no object", 400, "object"),
        ("PUT", "/workers/w9/adapters", {"a": "b"}, 404, "w9"),
        ("PUT", "/workers/w9/adapters", {"a": 5}, 400, "str"),
        ("POST", "/workers", {"worker_id": "w9", "endpoint": "tcp://*:5557"}, 400, "endpoint"),
        ("POST", "/workers", {"worker_id": "w9", "endpoint": "tcp://10.0.0.1"}, 400, "endpoint"),
        ("POST", "/workers", {"worker_id": "w9", "endpoint": "ipc:///" + "x" * 300}, 400, "nothing to connect to"),
        ("DELETE", "/workers/w9", None, 404, "w9"),
        ("GET", "/nowhere", None, 404, "Not Found"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_says_why(
    service: Service, method: str, path: str, body: Any, status: int, says: str
) -> None:
    for _ in range(2):  # what is refused once is refused again
        answered, error = await service.call(method, path, body)
        assert (answered, says in error["error"]["message"]) == (status, True), error
    assert (await service.call("GET", "/workers"))[1]["workers"] == {}
