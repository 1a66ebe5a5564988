"""Cases 30, 31, 32, 34 and 39 on a fleet of four emulated engines: load spreads, and what is too much is refused."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.adapters.entry import Placement
from deployment.assets.tiny import make_adapter
from router.admission import AdmissionConfig
from router.choice import LoggedDecision, replay
from tests.integration.asking import CHAT, COMPLETIONS, ask, noise, user
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.crowd import Wish, ask_all, crowd
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.local_fleet import PAGE, SERVED
from tests.integration.test_disconnect import sent

pytestmark = pytest.mark.engine

NUM_WORKERS = 4
NAMES = tuple(f"cold-{i:02}" for i in range(24))
"""More adapters than the fleet keeps loaded: some are always cold."""
MAX_LOADED = 4
NUM_AT_ONCE = 2048
NUM_MADE_UP = 5000
ROUNDING_MS = 0.051
"""Headers say costs to a tenth of a millisecond."""


@pytest.fixture(scope="module")
def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedFleet]:
    shelf = tmp_path_factory.mktemp("cold")
    adapters = {name: make_adapter(tiny_model, shelf / name, seed=i, rank=4) for i, name in enumerate(NAMES)}
    fleet = EmulatedFleet(
        tiny_model,
        num_workers=NUM_WORKERS,
        adapters=adapters,
        placement=Placement.ON_DEMAND,
        max_loaded=MAX_LOADED,
        cache_tokens=16_384,
    )
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture(autouse=True)
def at_rest(four: EmulatedFleet) -> Iterator[None]:
    four.wait_at_rest()
    yield
    four.wait_at_rest()


@pytest.fixture
def client(four: EmulatedFleet) -> Iterator[httpx.Client]:
    with four.client() as client:
        yield client


def workers_of(decisions: list[LoggedDecision]) -> list[str]:
    return [one.candidates[one.chosen].worker for one in decisions]


def cost_ms(decision: LoggedDecision) -> float:
    return sum(decision.candidates[decision.chosen].terms_ms.values())


# -- 30, 31, 32: where requests go -------------------------------------------------------------------------------


def test_case_30_a_queue_weighs_more_than_a_large_index(four: EmulatedFleet, client: httpx.Client) -> None:
    """A small index and 50 queued here, a large one and nothing queued there, a prompt that nobody has: not here."""
    rng = random.Random(30)
    only_there = NAMES[0]
    busy = ask(client, model=only_there, prompt=noise(rng, 2 * PAGE)).worker or ""
    large = next(worker for worker in four.workers if worker != busy)
    with four.engine(large) as engine:
        for _ in range(40):
            ask(engine, prompt=noise(rng, 12 * PAGE), max_tokens=1)
    four.catch_up()
    blocks: dict[str, int] = four.call(
        lambda: {source.worker_id: four.core.ingest.index.num_blocks(source) for source in four.sources_now()}
    )
    assert blocks[large] > 5 * blocks[busy] > 0, blocks

    with ExitStack() as waiting:
        for _ in range(50):
            body = {"model": only_there, "prompt": noise(rng, PAGE + 1), "max_tokens": 200, "ignore_eos": True}
            waiting.enter_context(sent(four.url, COMPLETIONS, body))
        poll(lambda: four.booked() == 50, what="50 booked")
        since = four.next_number()
        answers = [ask(client, prompt=noise(rng, length)) for length in (PAGE, 10 * PAGE, 30 * PAGE) for _ in range(4)]
        assert four.booked() == 50
        decisions = four.decisions(since).decisions

    assert {answer.predicted for answer in answers} == {0}
    assert busy not in {answer.worker for answer in answers}
    assert workers_of(decisions) == [answer.worker for answer in answers]
    for decision in decisions:
        there = {one.worker: one for one in decision.candidates}
        assert there[busy].running == 50
        assert there[busy].terms_ms["queue"] > 0
        assert there[large].terms_ms.get("queue", 0.0) == 0
        assert sum(there[large].terms_ms.values()) < sum(there[busy].terms_ms.values())


def test_case_31_requests_before_any_first_byte_are_spread_evenly(four: EmulatedFleet) -> None:
    rng = random.Random(31)
    wishes = [Wish({"model": SERVED, "prompt": noise(rng, 40), "max_tokens": 2}) for _ in range(64)]
    since = four.next_number()

    async def asking() -> list[Any]:
        async with crowd(four.url) as clients:
            with four.stopped(*four.workers):  # nobody answers before all are decided
                replies = asyncio.ensure_future(clients.send_all(wishes))
                await asyncio.to_thread(poll, lambda: four.booked() == 64, what="64 booked")
            return await replies

    replies = asyncio.run(asking())
    decisions = four.decisions(since).decisions

    assert {reply.status for reply in replies} == {200}
    spread = Counter(workers_of(decisions))
    assert len(decisions) == 64
    assert len(spread) == NUM_WORKERS
    assert max(spread.values()) - min(spread.values()) <= 1, spread
    assert Counter(reply.worker for reply in replies) == spread
    said = sorted((reply.worker, float(reply.headers["x-loray-cost-ms"])) for reply in replies)
    logged = sorted((workers_of([one])[0], cost_ms(one)) for one in decisions)
    assert [worker for worker, _ in said] == [worker for worker, _ in logged]
    assert all(abs(a - b) < ROUNDING_MS for (_, a), (_, b) in zip(said, logged, strict=True))


def test_case_32_a_hot_prefix_gets_copies_where_one_worker_is_too_few(
    four: EmulatedFleet, client: httpx.Client
) -> None:
    rng = random.Random(32)
    hot = noise(rng, 32 * PAGE)
    first = ask(client, prompt=hot)
    assert first.worker == ask(client, prompt=hot).worker, "one worker holds it, and serves it while it can"
    wishes = [
        Wish({"model": SERVED, "prompt": hot + noise(rng, 4 * PAGE), "max_tokens": 16, "ignore_eos": True})
        for _ in range(600)
    ]
    replies = ask_all(four.url, wishes, at_once=160)

    assert {reply.status for reply in replies} == {200}
    served = Counter(reply.worker for reply in replies)
    assert len(served) == NUM_WORKERS, served
    assert max(served.values()) / (len(replies) / NUM_WORKERS) < 1.5, served
    four.catch_up()
    candidates = client.post("/loray/route", json={"model": SERVED, "prompt": hot + "!"}).json()["candidates"]
    assert {one["worker"]: one["predicted_cached_tokens"] for one in candidates} == dict.fromkeys(
        map(str, four.workers), len(hot)
    )


# -- 34: too much ------------------------------------------------------------------------------------------------


def test_case_34_requests_beyond_all_measure_are_served_or_told_when_to_return(four: EmulatedFleet) -> None:
    tight = AdmissionConfig(max_queued=300, queue_timeout_s=1.5)
    rng = random.Random(34)
    wishes = [
        Wish({"model": SERVED, "prompt": noise(rng, 160), "max_tokens": 60, "ignore_eos": True})
        for _ in range(NUM_AT_ONCE)
    ]
    with four.router_with(tight) as (router, url):
        replies = ask_all(url, wishes)
        assert len(replies) == NUM_AT_ONCE
        by_status = Counter(reply.status for reply in replies)
        refused = [reply for reply in replies if reply.status == 429]
        assert set(by_status) == {200, 429}, by_status
        assert by_status[200] >= 100, by_status
        codes = Counter(reply.code for reply in refused)
        assert set(codes) == {"queue_full", "queue_timeout"}, codes
        assert all(1 <= int(reply.headers["Retry-After"]) <= 60 for reply in refused)
        assert all(reply.headers["Content-Type"].startswith("application/json") for reply in refused)
        four.wait_at_rest(router)
        text = httpx.get(url + "/metrics", timeout=SETTLE_S).text
        for code, count in codes.items():
            assert f'loray_refused_requests_total{{code="{code}"}} {float(count)}\n' in text


# -- 39, and what a router says of itself ------------------------------------------------------------------------


def series(url: str) -> set[str]:
    text = httpx.get(url + "/metrics", timeout=SETTLE_S).text
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")}


def test_case_39_made_up_names_make_no_series(four: EmulatedFleet, client: httpx.Client) -> None:
    rng = random.Random(39)
    ask(client, prompt="a series of its own")
    poll(lambda: "loray_load_drifts_total" in series(four.url), what="measured once")
    before = series(four.url)

    def made_up(i: int) -> Wish:
        name = rng.choice((f"made-up-{i}", f"{SERVED}:made-up-{i}", f"org/made-up-{i}"))
        where = rng.choice(("model", "lora_path"))
        path = rng.choice((COMPLETIONS, CHAT, "/generate", "/loray/route"))
        body = {"model": SERVED, "prompt": "x", "messages": user("x"), "text": "x", "max_tokens": 1, where: name}
        return Wish(body, path)

    replies = ask_all(four.url, [made_up(i) for i in range(NUM_MADE_UP)], at_once=100)
    kept = series(four.url)

    assert {reply.status for reply in replies} == {404}
    assert {reply.code for reply in replies} == {"model_not_found"}
    assert kept - before == set()
    assert len(kept) < 1000


def test_every_answer_says_its_decisions_cost(four: EmulatedFleet, client: httpx.Client) -> None:
    rng = random.Random(1)
    shared = noise(rng, 20 * PAGE)
    asked: list[tuple[str, dict[str, Any]]] = []
    for i in range(24):
        body: dict[str, Any] = {"model": rng.choice((SERVED, *NAMES[:3])), "max_tokens": 2, "stream": bool(i % 2)}
        text = shared[: rng.randrange(1, 20 * PAGE)] + noise(rng, 9)
        path = rng.choice((CHAT, COMPLETIONS))
        asked.append((path, body | ({"messages": user(text)} if path == CHAT else {"prompt": text})))
    for path, body in asked:
        since = four.next_number()
        with client.stream("POST", path, json=body) as response:
            response.read()
        assert response.status_code == 200, response.text
        (decision,) = four.decisions(since).decisions
        chosen = decision.candidates[decision.chosen]
        assert response.headers["x-loray-worker"] == chosen.worker
        assert response.headers["x-loray-predicted-cached-tokens"] == str(chosen.predicted_cached_tokens)
        assert abs(float(response.headers["x-loray-cost-ms"]) - cost_ms(decision)) < ROUNDING_MS
        assert cost_ms(decision) > 0


def test_decisions_replay_as_they_were(four: EmulatedFleet) -> None:
    """Under all kinds of load: idle, crowded, many adapters, all workers alike. With another seed it isn't the same."""
    rng = random.Random(2)
    since = four.next_number()
    wishes = [
        Wish({"model": rng.choice((SERVED, *NAMES[:6])), "prompt": noise(rng, rng.randrange(1, 500)), "max_tokens": 4})
        for _ in range(400)
    ]
    equals = [Wish({"model": SERVED, "prompt": noise(rng, PAGE - 1), "max_tokens": 1}) for _ in range(30)]
    replies = ask_all(four.url, wishes[:350], at_once=80) + ask_all(four.url, wishes[350:] + equals, at_once=1)
    log = four.decisions(since)

    assert {reply.status for reply in replies} == {200}
    assert len(log.decisions) >= 400
    assert replay(log.decisions, seed=int(log.seed)) == []
    assert len({len(one.candidates) for one in log.decisions}) > 1
    assert replay(log.decisions, seed=int(log.seed) ^ 1) != [], "no lot was drawn: the test proved little"
