"""Real engines behind a wire that loses, doubles and delays a tenth of their event batches each."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import zmq

from router.ids import WorkerId
from router.reports import WorkerReport
from tests.integration.asking import CHAT, ask, noise, user
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet
from tests.lossy_wire import LossyWire

pytestmark = pytest.mark.engine

NUM_REQUESTS = 200
NUM_THREADS = 4
SHARE = 0.1
LONGEST_DELAY_S = 0.5


class HeartbeatProxy:
    """Passes a worker's heartbeats on, with the event endpoints of its ranks replaced by lossy wires."""

    def __init__(self, endpoint: str, wire: Callable[[str], LossyWire]) -> None:
        self._wire = wire
        self._ended = threading.Event()
        self._context = zmq.Context()
        self._source = self._context.socket(zmq.SUB)
        self._source.subscribe(b"")
        self._source.connect(endpoint)
        self._sink = self._context.socket(zmq.PUB)
        self.endpoint = f"tcp://127.0.0.1:{self._sink.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(SETTLE_S)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self._source.poll(20):
                continue
            report = msgspec.msgpack.decode(self._source.recv(), type=WorkerReport)
            ranks = tuple(
                msgspec.structs.replace(rank, endpoint=self._wire(rank.endpoint).endpoint) for rank in report.ranks
            )
            self._sink.send(msgspec.msgpack.encode(msgspec.structs.replace(report, ranks=ranks)))


@contextmanager
def lossy(fleet: LocalFleet, seed: int) -> Iterator[tuple[Mapping[WorkerId, str], dict[str, LossyWire], list[int]]]:
    """Heartbeat endpoints behind which every event stream is lossy; the wires; and a count of what each did."""
    rng = random.Random(seed)
    wires: dict[str, LossyWire] = {}
    counts = [0, 0, 0]

    def fate(_seq: int) -> int:
        draw = rng.random()
        if draw < SHARE:
            counts[0] += 1
            return 0
        if draw < 2 * SHARE:
            counts[1] += 1
            return 2
        return 1

    def delay_s(_seq: int) -> float:
        if rng.random() < SHARE:
            counts[2] += 1
            return rng.random() * LONGEST_DELAY_S
        return 0.0

    def wire(endpoint: str) -> LossyWire:
        if endpoint not in wires:
            wires[endpoint] = LossyWire(endpoint, publish=lambda: None)
            wires[endpoint].fate, wires[endpoint].delay_s = fate, delay_s
        return wires[endpoint]

    proxies = {worker_id: HeartbeatProxy(endpoint, wire) for worker_id, endpoint in fleet.heartbeats().items()}
    try:
        yield {worker_id: proxy.endpoint for worker_id, proxy in proxies.items()}, wires, counts
    finally:
        for proxy in proxies.values():
            proxy.close()
        for one in wires.values():
            one.close()


def test_after_loss_doubling_and_delay_the_audit_is_clean(
    fleet: LocalFleet, client: httpx.Client, record_property: Callable[[str, object], None]
) -> None:
    with lossy(fleet, seed=5) as (heartbeats, wires, counts), fleet.another_router(heartbeats) as (router, url):
        fleet.wait_whole(router)
        for wire in wires.values():
            wire.wait_listener()
        rng = random.Random(6)
        shared = [noise(rng, 60) for _ in range(8)]
        models = (SERVED, *ADAPTERS)
        asked = [(models[i % 3], shared[rng.randrange(8)] + noise(rng, 30)) for i in range(NUM_REQUESTS)]

        def send(request: tuple[str, str]) -> None:
            model, text = request
            with httpx.Client(base_url=url, timeout=SETTLE_S) as mine:
                ask(mine, CHAT, model=model, messages=user(text))

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(send, asked))
        ended_s = time.monotonic()

        def audit() -> dict[str, object] | None:
            answer = httpx.post(f"{url}/loray/audit", timeout=SETTLE_S).json()
            assert not any(source["verdict"] == "dirty" for source in answer["sources"]), answer
            return answer if answer["clean"] else None

        found = poll(audit, what="a clean audit")
        record_property("seconds_to_a_clean_audit", round(time.monotonic() - ended_s, 2))
        record_property("lost_doubled_delayed", counts)
        assert found is not None
        assert (found["ghosts"], found["missing"]) == (0, 0)
        assert min(counts) > 0, counts
        ingest = router._core.ingest
        gaps = fleet.call(lambda: sum(ingest.cursor(source).gaps for source in fleet.sources_now()))
        assert gaps > 0
