"""Cases 35 and 36, and engines that fail without dying, on a fleet of four emulated ones: nobody who can be helped
notices, and who fails is left alone until it is well.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.choice import LoggedDecision
from router.health import FAILURES, MIN_STALL_S
from router.ids import WorkerId
from router.reports import WorkerState
from tests.integration.asking import COMPLETIONS, DONE, ask, events, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.crowd import Reply, Wish, ask_all, crowd
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.failing_worker import FAILING_ID, failing_worker
from tests.integration.local_fleet import PAGE, SERVED

pytestmark = pytest.mark.engine

NUM_WORKERS = 4
LONG: dict[str, Any] = {"model": SERVED, "max_tokens": 300, "ignore_eos": True, "temperature": 0}
"""Two seconds and more."""


@pytest.fixture(scope="module")
def four(tiny_model: Path) -> Iterator[EmulatedFleet]:
    fleet = EmulatedFleet(tiny_model, num_workers=NUM_WORKERS)
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture(autouse=True)
def whole(four: EmulatedFleet) -> Iterator[None]:
    yield
    four.wait_back()
    four.wait_at_rest()


@pytest.fixture
def plain(four: EmulatedFleet) -> Iterator[httpx.Client]:
    """One that waits for no events: a failing worker has none."""
    with httpx.Client(base_url=four.url, timeout=SETTLE_S) as client:
        yield client


@pytest.fixture
def client(four: EmulatedFleet) -> Iterator[httpx.Client]:
    with four.client() as client:
        yield client


def status(four: EmulatedFleet, worker_id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(four.url + "/loray/status", timeout=SETTLE_S).json()["workers"][worker_id]
    return found


def metric(four: EmulatedFleet, line: str) -> float:
    """A sample by its name and labels; 0 where there is none."""
    text = httpx.get(four.url + "/metrics", timeout=SETTLE_S).text
    return next((float(one.rsplit(" ", 1)[1]) for one in text.splitlines() if one.rsplit(" ", 1)[0] == line), 0.0)


def suspensions(four: EmulatedFleet) -> float:
    return metric(four, "loray_worker_suspensions_total")


def retries(four: EmulatedFleet, worker_id: str) -> float:
    return metric(four, f'loray_retries_total{{worker="{worker_id}"}}')


def attempts(decisions: Sequence[LoggedDecision]) -> dict[int, list[str]]:
    """Workers that each request was sent to, by its prompt's length, which no two share."""
    found: dict[int, list[str]] = {}
    for one in decisions:
        found.setdefault(one.prompt_tokens or 0, []).append(one.candidates[one.chosen].worker)
    return found


def held_by_one(client: httpx.Client, rng: random.Random) -> tuple[str, str]:
    """A long prompt, and the one worker that holds it."""
    prompt = noise(rng, 20 * PAGE)
    return prompt, ask(client, prompt=prompt).worker or ""


# -- death -------------------------------------------------------------------------------------------------------


def test_case_35_requests_at_a_worker_that_is_killed_succeed_elsewhere_in_one_post(
    four: EmulatedFleet, client: httpx.Client
) -> None:
    prompt, victim = held_by_one(client, random.Random(35))
    before = retries(four, victim)
    since = four.next_number()
    wishes = [Wish({**LONG, "prompt": prompt + "#" * i}) for i in range(1, 5)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, four.url, wishes)
        poll(lambda: four.running(victim) == len(wishes), what="all run there")
        four.kill_engine(victim)
        replies = answers.result()

    assert {reply.status for reply in replies} == {200}
    assert victim not in {reply.worker for reply in replies}
    tried = attempts(four.decisions(since).decisions)
    assert tried == {len(prompt) + i: [victim, replies[i - 1].worker] for i in range(1, 5)}
    assert retries(four, victim) - before == len(wishes)
    usages = [json.loads(reply.body)["usage"] for reply in replies]
    assert [usage["prompt_tokens"] for usage in usages] == sorted(tried)
    assert {usage["completion_tokens"] for usage in usages} == {LONG["max_tokens"]}


def test_case_36_a_stream_that_breaks_ends_with_one_error_and_says_no_token_twice(
    four: EmulatedFleet, client: httpx.Client
) -> None:
    rng = random.Random(36)
    prompt, victim = held_by_one(client, rng)
    expected = ask(client, **{**LONG, "prompt": prompt}).text
    assert len(expected) == LONG["max_tokens"]

    async def breaking() -> bytes:
        async with crowd(four.url) as clients, clients.stream(Wish({**LONG, "prompt": prompt, "stream": True})) as it:
            assert it.headers["x-loray-worker"] == victim
            raw = b""
            while raw.count(b"data: ") < 3:
                raw += await it.content.readany()
            four.kill_engine(victim)
            return raw + await it.content.read()

    *chunks, last = events(asyncio.run(breaking()).decode())
    parts = [json.loads(chunk) for chunk in chunks]
    text = "".join(choice["text"] for part in parts for choice in part["choices"])
    assert len(parts) >= 3
    assert 0 < len(text) < len(expected), "it wasn't killed in its midst"
    assert expected.startswith(text)
    error = json.loads(last)["error"]
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")
    assert victim in error["message"]


def test_two_workers_that_die_at_once_cost_nobody_an_answer(four: EmulatedFleet) -> None:
    """Both die with requests that have no byte yet; no retry goes where the request has been."""
    rng = random.Random(37)
    wishes = [
        Wish({"model": SERVED, "prompt": noise(rng, 60 + i), "max_tokens": 8, "ignore_eos": True, "stream": i % 2 == 0})
        for i in range(60)
    ]
    victims = ("w1", "w2")
    since = four.next_number()
    with ThreadPoolExecutor(1) as pool, four.stopped(*victims) as processes:
        answers = pool.submit(ask_all, four.url, wishes)
        poll(lambda: four.booked() >= 20 and four.queued() == 0, what="both have requests")
        for worker_id, process in processes.items():
            four.kill_engine(worker_id, process)
        replies = answers.result()

    assert {reply.status for reply in replies} == {200}
    for wish, reply in zip(wishes, replies, strict=True):
        if wish.body["stream"]:
            *chunks, done = events(reply.body.decode())
            assert done == DONE
            text = "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])
            assert len(text) == 8
        else:
            assert len(reply.text) == 8
    tried = attempts(four.decisions(since).decisions)
    assert len(tried) == len(wishes)
    assert all(len(set(workers)) == len(workers) for workers in tried.values()), tried
    retried = [workers for workers in tried.values() if len(workers) > 1]
    assert {workers[0] for workers in retried} == set(victims)
    assert {w: reply.worker for w, reply in zip(sorted(tried), replies, strict=True)} == {
        length: workers[-1] for length, workers in tried.items()
    }


# -- failing without dying ---------------------------------------------------------------------------------------


def test_an_engine_that_answers_500_is_suspended_and_used_again_once_it_is_well(
    four: EmulatedFleet, plain: httpx.Client
) -> None:
    rng = random.Random(38)
    before = suspensions(four)
    with failing_worker(four) as worker:

        def ask_some(num: int) -> set[str]:
            return {ask(plain, prompt=noise(rng, 20), max_tokens=1).worker or "" for _ in range(num)}

        served: set[str] = set()
        while worker.asked < FAILURES:
            served |= ask_some(1)
        poll(lambda: status(four, FAILING_ID)["suspended"], what="suspended")
        served |= ask_some(20)
        assert worker.asked == FAILURES, "it is asked on while suspended"
        assert FAILING_ID not in served
        assert suspensions(four) == before + 1
        assert metric(four, f'loray_worker_suspended{{worker="{FAILING_ID}"}}') == 1
        assert retries(four, FAILING_ID) == FAILURES
        poll(lambda: worker.probed >= 2, what="probed more than once")
        assert status(four, FAILING_ID)["suspended"]

        worker.status = 200
        poll(lambda: not status(four, FAILING_ID)["suspended"], what="well again")
        assert metric(four, f'loray_worker_suspended{{worker="{FAILING_ID}"}}') == 0
        poll(lambda: FAILING_ID in ask_some(1), what="used again")
        assert suspensions(four) == before + 1


def test_a_clients_fault_is_told_as_it_is_and_never_suspends(four: EmulatedFleet, plain: httpx.Client) -> None:
    before = suspensions(four), [retries(four, w) for w in four.workers]
    since = four.next_number()
    num = 3 * NUM_WORKERS * FAILURES
    bad = {"model": SERVED, "prompt": "x", "max_tokens": "many"}
    assert [plain.post(COMPLETIONS, json=bad).status_code for _ in range(num)] == [400] * num
    assert len(four.decisions(since).decisions) == num
    with failing_worker(four) as worker:
        for worker.status in (400, 404, 422, 429):
            answered = [plain.post(COMPLETIONS, json={**bad, "max_tokens": 1}) for _ in range(8)]
            theirs = [a for a in answered if a.headers["x-loray-worker"] == FAILING_ID]
            assert {a.status_code for a in theirs} <= {worker.status}
            assert all(a.status_code == 200 for a in answered if a not in theirs)
        assert worker.asked >= FAILURES
        assert not status(four, FAILING_ID)["suspended"]
        assert worker.probed == 0
    assert not any(status(four, worker)["suspended"] for worker in four.workers)
    assert (suspensions(four), [retries(four, w) for w in four.workers]) == before


def test_an_engine_that_stands_still_loses_its_requests_to_others_and_gets_new_ones_once_it_goes_on(
    four: EmulatedFleet, client: httpx.Client
) -> None:
    rng = random.Random(39)
    prompt, victim = held_by_one(client, rng)
    before = suspensions(four), retries(four, victim)
    wishes = [Wish({"model": SERVED, "prompt": prompt + "#" * i, "stream": i % 2 == 0}) for i in range(1, 7)]
    since = four.next_number()

    async def asking() -> tuple[list[Reply], bytes]:
        loop = asyncio.get_running_loop()
        async with crowd(four.url) as clients, clients.stream(Wish({**LONG, "prompt": prompt, "stream": True})) as it:
            assert it.headers["x-loray-worker"] == victim
            raw = await it.content.readany()
            with four.stopped(victim):
                started_s = loop.time()
                replies = await clients.send_all(wishes)
                assert loop.time() - started_s >= MIN_STALL_S, "nobody waited: the test proves nothing"
                assert (await asyncio.to_thread(status, four, victim))["suspended"]
                assert await asyncio.to_thread(metric, four, f'loray_worker_suspended{{worker="{victim}"}}') == 1
                others = await clients.send_all([Wish({"model": SERVED, "prompt": prompt, "max_tokens": 1})] * 8)
            return [*replies, *others], raw + await it.content.read()

    replies, stream = asyncio.run(asking())
    assert {reply.status for reply in replies} == {200}
    assert victim not in {reply.worker for reply in replies}
    tried = attempts(four.decisions(since).decisions)
    lost = 0
    for i, reply in enumerate(replies[: len(wishes)], 1):
        *failed, answered = tried[len(prompt) + i]
        assert (failed, answered) in (([victim], reply.worker), ([], reply.worker))
        lost += len(failed)
    assert lost >= 2, "the test proves little"
    assert suspensions(four) == before[0] + 1
    assert retries(four, victim) == before[1] + lost
    *chunks, done = events(stream.decode())
    assert done == DONE, "what had begun there goes on there"
    text = "".join(choice["text"] for chunk in chunks for choice in json.loads(chunk)["choices"])
    assert len(text) == LONG["max_tokens"]

    poll(lambda: not status(four, victim)["suspended"], what="well again")
    assert metric(four, f'loray_worker_suspended{{worker="{victim}"}}') == 0
    crowded = [Wish({"model": SERVED, "prompt": noise(rng, 20), "max_tokens": 1}) for _ in range(64)]
    poll(lambda: victim in {reply.worker for reply in ask_all(four.url, crowded)}, what="used again")


def test_a_worker_that_drains_finishes_what_runs_and_gets_nothing_new(
    four: EmulatedFleet, client: httpx.Client
) -> None:
    prompt, drained = held_by_one(client, random.Random(40))
    worker, before = four.workers[WorkerId(drained)], suspensions(four)
    wishes = [Wish({**LONG, "prompt": prompt + "#" * i, "stream": i == 1}) for i in range(1, 4)]
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, four.url, wishes)
        poll(lambda: four.running(drained) == len(wishes), what="all run there")
        four.call(worker.drain)
        four.wait(
            lambda: four.core.workers[WorkerId(drained)].report.state is WorkerState.DRAINING, what="the router knows"
        )
        assert four.running(drained) == len(wishes), "nothing runs any more: the test proves nothing"
        meanwhile = {ask(client, prompt=prompt + str(i), max_tokens=1).worker for i in range(8)}
        replies = answers.result()
    assert drained not in meanwhile
    assert {reply.status for reply in replies} == {200}
    assert {reply.worker for reply in replies} == {drained}
    assert events(replies[0].body.decode())[-1] == DONE
    assert [len(reply.text) for reply in replies[1:]] == [LONG["max_tokens"]] * 2
    assert suspensions(four) == before
    four.kill_engine(drained)  # the next life isn't draining
