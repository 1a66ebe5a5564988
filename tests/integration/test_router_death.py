"""A router is killed under traffic and comes back: whoever asks again is served, and it is exact at once."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.integration.asking import COMPLETIONS, ask, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet
from tests.integration.router_process import RouterProcess
from tests.integration.table_rpc import TableServer

pytestmark = pytest.mark.engine

NUM_CLIENTS = 2
BEFORE, AFTER = 6, 6
"""Requests of each client before the kill and after the return, at least."""
MODELS = (SERVED, *ADAPTERS)

PACE_S = 0.1
"""Of each client: whatever starts anew beside it needs the cores."""


@dataclass
class Asking:
    """One client that asks on until told to end, and asks again what got no answer."""

    url: str
    retries: bool
    shared: list[str]
    answers: int = 0
    again: int = 0
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not self.ended.is_set():
                text = rng.choice(self.shared) + noise(rng, 20)
                self._ask({"model": rng.choice(MODELS), "prompt": text, "max_tokens": 2, "temperature": 0})
                self.answers += 1
                self.ended.wait(PACE_S)
        except Exception as exc:  # noqa: BLE001  # told by the test
            self.error = exc

    def _ask(self, body: dict[str, object]) -> None:
        while True:
            try:
                answer = httpx.post(self.url + COMPLETIONS, json=body, timeout=SETTLE_S)
                if answer.status_code == 200:
                    return
                assert self.retries, answer.text
                assert answer.status_code in (502, 503), answer.text
            except httpx.TransportError:
                if not self.retries:
                    raise
            self.again += 1
            self.ended.wait(PACE_S)


class Killable:
    """A router process."""

    def __init__(self, path: Path, url: str) -> None:
        self.url = url
        self._path = path
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.integration.router_process", str(self._path)]
        self._process = subprocess.Popen(command)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(SETTLE_S)

    def serves(self) -> bool:
        try:
            return httpx.get(self.url + "/health").status_code == 200
        except httpx.TransportError:
            return False

    def is_exact(self, num_ranks: int) -> bool:
        status = httpx.get(self.url + "/loray/status").json()
        states = [rank["state"] for worker in status["workers"].values() for rank in worker["ranks"]]
        return states == ["exact"] * num_ranks


@pytest.fixture
def killable(fleet: LocalFleet, tmp_path: Path) -> Iterator[Killable]:
    settings = fleet.router_settings("r9")

    async def serve_table() -> TableServer:
        return TableServer(fleet.port)

    server = fleet.run(serve_table())
    path = tmp_path / "router.msgpack"
    path.write_bytes(msgspec.msgpack.encode(RouterProcess(settings, server.endpoint, fleet.heartbeats())))
    router = Killable(path, f"http://127.0.0.1:{settings.config.port}")
    router.start()
    yield router
    router.kill()
    fleet.run(server.close())


def test_a_killed_router_is_exact_again_and_no_request_is_lost(
    fleet: LocalFleet, client: httpx.Client, killable: Killable, record_property: Callable[[str, object], None]
) -> None:
    num_ranks = len(fleet.sources())
    poll(killable.serves, what="it serves")
    poll(lambda: killable.is_exact(num_ranks), what="it is exact")
    rng = random.Random(50)
    shared = [noise(rng, 64) for _ in range(6)]
    through_it = [Asking(killable.url, True, shared) for _ in range(NUM_CLIENTS)]
    through_the_other = [Asking(fleet.url, False, shared) for _ in range(NUM_CLIENTS)]
    everybody = [*through_it, *through_the_other]
    threads = [threading.Thread(target=one.run, args=(seed,)) for seed, one in enumerate(everybody)]
    for thread in threads:
        thread.start()
    poll(lambda: min(one.answers for one in everybody) >= BEFORE, what="traffic")

    killable.kill()
    poll(lambda: min(one.again for one in through_it) > 0, what="its clients notice")
    killable.start()
    poll(killable.serves, what="it serves again")
    served_s = time.monotonic()
    poll(lambda: killable.is_exact(num_ranks), what="it is exact again")
    record_property("seconds_from_serving_to_exact", round(time.monotonic() - served_s, 2))
    before = [one.answers for one in everybody]
    poll(
        lambda: all(one.answers >= b + AFTER for one, b in zip(everybody, before, strict=True)), what="traffic goes on"
    )
    for one in everybody:
        one.ended.set()
    for thread in threads:
        thread.join(SETTLE_S)

    assert [one.error for one in everybody] == [None] * len(everybody)
    assert [one.again for one in through_the_other] == [0] * NUM_CLIENTS
    fleet.settle()
    with httpx.Client(base_url=killable.url, timeout=SETTLE_S) as mine:
        for text in shared:
            answer = ask(mine, prompt=text + noise(rng, 20))
            assert answer.predicted == answer.cached > 0
            fleet.settle()
    assert poll(lambda: httpx.post(killable.url + "/loray/audit", timeout=SETTLE_S).json()["clean"], what="clean")


def test_before_the_catalogue_has_come_nothing_is_said_not_to_exist(fleet: LocalFleet, killable: Killable) -> None:
    poll(killable.serves, what="it serves")
    killable.kill()
    fleet.run(fleet.port.kill())
    try:
        killable.start()
        poll(killable.serves, what="it serves without the table")
        asked = {"model": "adapter-a", "prompt": [5, 6, 7], "max_tokens": 1}
        for answer in (
            httpx.post(killable.url + "/v1/completions", json=asked),
            httpx.get(killable.url + "/v1/models"),
            httpx.get(killable.url + "/v1/models/adapter-a"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker_available"), answer.text
        assert httpx.get(killable.url + "/ready").status_code == 503
        known = httpx.post(killable.url + "/v1/completions", json={**asked, "model": SERVED}, timeout=SETTLE_S)
        assert known.status_code in (200, 503)  # the base model needs no catalogue, only a worker that has been heard
    finally:
        fleet.run(fleet.port.revive())
    poll(lambda: httpx.get(killable.url + "/ready").status_code == 200, what="the catalogue comes")
    assert httpx.post(killable.url + "/v1/completions", json=asked, timeout=SETTLE_S).status_code == 200
