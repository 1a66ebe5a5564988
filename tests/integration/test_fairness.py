"""Requests that wait in the router: adapters take turns, priorities are kept, whoever floods waits behind itself.

Engines stand still while a backlog builds up, so that its order is known, and go on to serve it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from actors.router import Router
from router.admission import AdmissionConfig
from router.choice import LoggedDecision
from tests.integration.asking import ask, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.crowd import Crowd, Reply, Wish, crowd
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.local_fleet import ADAPTERS, SERVED

pytestmark = pytest.mark.engine

A, B = ADAPTERS
PRIORITY = "x-loray-priority"


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[EmulatedFleet]:
    fleet = EmulatedFleet(tiny_model, num_workers=2)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture(autouse=True)
def at_rest(two: EmulatedFleet) -> Iterator[None]:
    two.wait_at_rest()
    yield
    two.wait_at_rest()


def wishes(rng: random.Random, num: int, model: str, *, length: int = 160, priority: str | None = None) -> list[Wish]:
    headers = {} if priority is None else {PRIORITY: priority}
    return [
        Wish(
            {"model": model, "prompt": noise(rng, length), "max_tokens": 40, "ignore_eos": True},
            headers=headers,
        )
        for _ in range(num)
    ]


class Backlog:
    """Requests that are sent while the engines stand still."""

    def __init__(self, fleet: EmulatedFleet, router: Router, clients: Crowd) -> None:
        self._fleet = fleet
        self._router = router
        self._clients = clients
        self._sent = self._seen()

    async def add(self, more: Sequence[Wish]) -> asyncio.Future[list[Reply]]:
        """Send, and return once the router has seen all of them."""
        replies = asyncio.ensure_future(self._clients.send_all(more))
        self._sent += len(more)
        await asyncio.to_thread(poll, lambda: self._seen() == self._sent, what=f"{self._sent} seen")
        return replies

    def _seen(self) -> int:
        refused = self._fleet.call(lambda: sum(self._router._admission.refused.values()))
        return self._fleet.booked(self._router) + self._fleet.queued(self._router) + refused


def lengths_of(decisions: Sequence[LoggedDecision]) -> list[int]:
    return [one.prompt_tokens or 0 for one in decisions]


def test_adapters_take_turns_in_a_backlog(two: EmulatedFleet) -> None:
    rng = random.Random(1)

    async def asking() -> list[LoggedDecision]:
        async with crowd(two.url) as clients:
            with two.stopped(*two.workers):
                line = Backlog(two, two.router, clients)
                flood = await line.add(wishes(rng, 120, A))
                queued = await asyncio.to_thread(two.queued)
                assert queued > 80, "the fleet has room for the flood: the test proves nothing"
                late = await line.add(wishes(rng, 30, B))
                since = await asyncio.to_thread(two.next_number)
            assert {reply.status for reply in [*await flood, *await late]} == {200}
        return two.decisions(since).decisions

    names = [one.adapter for one in asyncio.run(asking())]
    assert names.count(B) == 30
    last = len(names) - 1 - names[::-1].index(B)
    lead = [names[:i].count(A) - names[:i].count(B) for i in range(last + 1)]
    assert -2 <= min(lead) <= max(lead) <= 2, names


def test_single_requests_pass_by_a_flood(two: EmulatedFleet) -> None:
    """While one adapter floods, another's requests are passed by a few of the flood, not by all that came before."""
    rng = random.Random(2)
    passed: list[tuple[int, int]] = []

    async def asking() -> None:
        async with crowd(two.url) as clients:
            flood = asyncio.ensure_future(clients.send_all(wishes(rng, 250, A)))
            await asyncio.to_thread(poll, lambda: two.queued() > 120, what="a backlog")
            while (queued := await asyncio.to_thread(two.queued)) > 60:
                since = await asyncio.to_thread(two.next_number)
                reply = await clients.send(wishes(rng, 1, B)[0])
                assert reply.status == 200, reply
                names = [one.adapter for one in (await asyncio.to_thread(two.decisions, since)).decisions]
                passed.append((names.index(B), queued))
            assert {reply.status for reply in await flood} == {200}

    asyncio.run(asking())
    assert len(passed) >= 3, passed
    assert all(4 * num_before < queued for num_before, queued in passed), passed


def test_priorities_are_served_strictly_in_their_order(two: EmulatedFleet) -> None:
    rng = random.Random(3)
    order = {"high": 161, "normal": 162, "low": 163}
    sent = {
        None: wishes(rng, 30, SERVED, length=160),
        "low": [*wishes(rng, 8, A, length=163, priority="low"), *wishes(rng, 4, B, length=163, priority=" Low ")],
        "normal": [*wishes(rng, 6, B, length=162), *wishes(rng, 6, A, length=162, priority="normal")],
        "high": [*wishes(rng, 6, A, length=161, priority="high"), *wishes(rng, 6, B, length=161, priority="HIGH")],
    }

    async def asking() -> list[LoggedDecision]:
        async with crowd(two.url) as clients:
            with two.stopped(*two.workers):
                line = Backlog(two, two.router, clients)
                replies = [await line.add(some) for some in sent.values()]
                since = await asyncio.to_thread(two.next_number)
            assert {reply.status for some in replies for reply in await some} == {200}
        return two.decisions(since).decisions

    decided = [length for length in lengths_of(asyncio.run(asking())) if length in order.values()]
    assert Counter(decided) == dict.fromkeys(order.values(), 12)
    for name, length in order.items():
        at = [i for i, one in enumerate(decided) if one == length]
        assert at == list(range(at[0], at[0] + 12)), (name, decided)
    assert decided == sorted(decided)


def test_a_full_queue_gives_up_the_floods_latest_not_whoever_comes(two: EmulatedFleet) -> None:
    """An adapter with less in line takes a place from the one with most; so does a higher priority from a lower."""
    rng = random.Random(4)
    bound = 40

    async def asking(router: Router, url: str) -> dict[str, list[Reply]]:
        async with crowd(url) as clients:
            with two.stopped(*two.workers):
                line = Backlog(two, router, clients)
                room = [await line.add(wishes(rng, 1, SERVED, priority="high"))]
                while await asyncio.to_thread(two.queued, router) < 1:
                    room.append(await line.add(wishes(rng, 1, SERVED, priority="high")))
                flood = await line.add(wishes(rng, 3 * bound, A, priority="low"))
                single = await line.add(wishes(rng, 10, B, priority="low"))
                urgent = await line.add(wishes(rng, 5, A, priority="high"))
                refused_now = await asyncio.to_thread(lambda: router._admission.refused["queue_full"])
                assert refused_now == 3 * bound - (bound - 1) + 15
            served = [reply for some in room for reply in await some]
            return {"room": served, "flood": await flood, "single": await single, "urgent": await urgent}

    with two.router_with(AdmissionConfig(max_queued=bound)) as (router, url):
        replies = asyncio.run(asking(router, url))
        two.wait_at_rest(router)
    statuses = {name: Counter(reply.status for reply in some) for name, some in replies.items()}
    assert set(statuses["room"]) == set(statuses["single"]) == set(statuses["urgent"]) == {200}, statuses
    assert statuses["flood"] == {200: bound - 1 - 15, 429: 3 * bound - (bound - 1) + 15}
    refused = [reply for reply in replies["flood"] if reply.status == 429]
    assert {reply.code for reply in refused} == {"queue_full"}
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)


@pytest.mark.parametrize("value", ["urgent", "", "0", "high,low"])
def test_a_priority_that_isnt_one_is_the_clients_fault(two: EmulatedFleet, value: str) -> None:
    since = two.next_number()
    with httpx.Client(base_url=two.url, timeout=SETTLE_S) as client:
        answer = client.post(
            "/v1/completions", json={"model": SERVED, "prompt": "x", "max_tokens": 1}, headers={PRIORITY: value}
        )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "invalid_request"
    assert all(word in error["message"] for word in (PRIORITY, "high", "normal", "low")), error
    assert two.next_number() == since
    with two.client() as client:
        ask(client, prompt="still here?")
