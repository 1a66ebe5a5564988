"""An engine is killed under load: nobody who can be helped notices, and it comes back as somebody new.

One death serves all tests of this module: the engine that streams a long answer is killed while threads ask on.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from router.ids import SourceId, WorkerId
from router.reports import WorkerReport
from tests.integration.asking import CHAT, COMPLETIONS, Answer, ask, events, noise, user
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ADAPTERS, BOOT_S, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NUM_THREADS = 4
ASKED_AFTERWARDS = 8
"""Requests each thread still sends after the kill."""
WARM = noise(random.Random(40), 100)
"""What the engine that will be killed holds."""


@dataclass
class Death:
    """What was seen of it."""

    worker: WorkerId
    before: WorkerReport
    after: WorkerReport
    stream: str
    statuses: list[int]
    warm_before: Answer
    leftover: list[psutil.Process]
    blocks_at_start: dict[SourceId, int]
    crashes: int
    last_error: str
    explained: dict[str, Any]


@dataclass
class Traffic:
    """Threads that ask, one request after the other, until they are told how many more."""

    url: str
    statuses: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    killed: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        rng = random.Random(number)
        left = ASKED_AFTERWARDS
        try:
            with httpx.Client(base_url=self.url, timeout=SETTLE_S) as client:
                while left:
                    left -= self.killed.is_set()
                    model = rng.choice((SERVED, *ADAPTERS))
                    body = {"model": model, "max_tokens": 4, "messages": user(noise(rng, 30)), "prompt": noise(rng, 30)}
                    self.statuses.append(client.post(rng.choice((CHAT, COMPLETIONS)), json=body).status_code)
        except httpx.HTTPError as exc:
            self.errors.append(exc)


@pytest.fixture(scope="module")
def death(fleet: LocalFleet) -> Iterator[Death]:
    fleet.wait_whole()
    fleet.settle()
    with httpx.Client(base_url=fleet.url, timeout=SETTLE_S) as client:
        warm = ask(client, prompt=WARM)
        victim = WorkerId(warm.worker or "")
        worker = fleet.workers[victim]
        before, crashed = fleet.call(worker.report), fleet.call(lambda: worker.status()["crashes"])
        process = psutil.Process(fleet.engine_pid(victim))
        family = [process, *process.children(recursive=True)]
        traffic = Traffic(fleet.url)
        threads = [threading.Thread(target=traffic.run, args=(i,)) for i in range(NUM_THREADS)]
        long = {"model": SERVED, "prompt": WARM, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETIONS, json=long) as response:
            assert response.headers["x-loray-worker"] == victim
            chunks = response.iter_text()
            stream = next(chunks)
            for thread in threads:
                thread.start()
            poll(lambda: len(traffic.statuses) >= NUM_THREADS, what="traffic")
            process.kill()
            traffic.killed.set()
            stream += "".join(chunks)
        for thread in threads:
            thread.join(timeout=2 * SETTLE_S)
            assert not thread.is_alive(), "a request hangs"
        assert traffic.errors == []
        _, leftover = psutil.wait_procs(family, timeout=SETTLE_S)
        fleet.wait_whole(within_s=BOOT_S)
        route = client.post("/loray/route", json={"model": SERVED, "prompt": WARM})
        status = fleet.call(worker.status)
        yield Death(
            worker=victim,
            before=before,
            after=fleet.call(worker.report),
            stream=stream,
            statuses=traffic.statuses,
            warm_before=warm,
            leftover=leftover,
            blocks_at_start=fleet.call(
                lambda: {s: fleet.core.ingest.index.num_blocks(s) for s in fleet.core.workers[victim].sources}
            ),
            crashes=status["crashes"] - crashed,
            last_error=status["last_error"],
            explained=route.json(),
        )


def test_no_request_fails(death: Death) -> None:
    assert len(death.statuses) >= NUM_THREADS * ASKED_AFTERWARDS
    assert set(death.statuses) == {200}


def test_a_stream_ends_with_one_error_event_and_nothing_after_it(death: Death) -> None:
    *chunks, last = events(death.stream)
    parts = [json.loads(chunk) for chunk in chunks]
    assert parts
    assert all(set(part) >= {"id", "choices"} for part in parts)
    error = json.loads(last)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == "engine_failed"
    assert death.worker in error["message"]


def test_nothing_is_left_of_the_killed_engine(death: Death) -> None:
    assert death.leftover == []


def test_the_worker_returns_as_a_new_incarnation_with_fresh_ports(death: Death) -> None:
    assert death.after.worker_id == death.before.worker_id
    assert death.after.incarnation != death.before.incarnation
    assert death.after.url != death.before.url
    ports = [{rank.endpoint, rank.replay_endpoint} for report in (death.before, death.after) for rank in report.ranks]
    assert not ports[0] & ports[1]
    assert [r.dp_rank for r in death.after.ranks] == [r.dp_rank for r in death.before.ranks]
    assert death.crashes == 1
    assert "while serving" in death.last_error


def test_no_block_of_the_dead_engine_is_believed(fleet: LocalFleet, death: Death) -> None:
    assert [*death.blocks_at_start.values()] == [0]
    assert {source.incarnation for source in death.blocks_at_start} == {death.after.incarnation}
    dead = [SourceId(death.worker, death.before.incarnation, rank.dp_rank) for rank in death.before.ranks]
    assert not any(source in fleet.core.ingest for source in dead)
    candidates = {c["worker"]: c["predicted_cached_tokens"] for c in death.explained["candidates"]}
    assert candidates[death.worker] == 0


def test_predictions_are_exact_afterwards(fleet: LocalFleet, death: Death) -> None:
    rng = random.Random(41)
    prompts = [WARM, *(noise(rng, 70) for _ in range(5))]
    fleet.settle()
    with fleet.client() as client, fleet.engine(death.worker) as engine:
        for model in (SERVED, *ADAPTERS):  # the newcomer holds something under every name
            ask(engine, model=model if model == SERVED else f"{SERVED}:{model}", prompt=prompts[1])
        fleet.settle()
        answers = [
            ask(client, model=model, prompt=prompt + "#" * i)
            for i, model in enumerate((SERVED, *ADAPTERS))
            for prompt in prompts
        ]
    assert [a.predicted for a in answers] == [a.cached for a in answers]
    assert any(a.worker == death.worker and a.cached for a in answers)


def test_the_books_balance(fleet: LocalFleet, death: Death) -> None:
    fleet.settle()
    fleet.check()
    gauges = httpx.get(f"{fleet.url}/metrics", timeout=SETTLE_S).text
    retries = [line for line in gauges.splitlines() if line.startswith(f'loray_retries_total{{worker="{death.worker}"')]
    assert retries, "nobody had to be helped: the test proved nothing"
