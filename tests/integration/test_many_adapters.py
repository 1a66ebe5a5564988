"""A hundred adapters on two real engines that hold eight each: nobody fails, and few are swapped (cases 28, 29)."""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import httpx
import pytest

from actors.adapters.entry import Placement
from deployment.assets.tiny import make_adapter
from tests.integration.adapters import engines_own_lists, listed
from tests.integration.asking import COMPLETIONS, ask
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ENGINE_KEY, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NUM_ADAPTERS = 100
MAX_LOADED = 8
NUM_REQUESTS = 300
NUM_CLIENTS = NUM_REQUESTS
"""All at once: what can be grouped shows."""
ZIPF = 1.1


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shelf = tmp_path_factory.mktemp("hundred")
    return {f"a{i:02}": make_adapter(tiny_model, shelf / f"a{i:02}", seed=i, rank=4) for i in range(NUM_ADAPTERS)}


@pytest.fixture(scope="module")
def crowded(tiny_model: Path, folders: dict[str, Path]) -> Iterator[LocalFleet]:
    fleet = LocalFleet(
        tiny_model, num_workers=2, adapters=folders, placement=Placement.ON_DEMAND, max_loaded=MAX_LOADED
    )
    fleet.start()
    yield fleet
    fleet.stop()


def requests(names: list[str], seed: int) -> list[str]:
    """Adapters of NUM_REQUESTS requests, popular by rank."""
    weights = [1 / (rank + 1) ** ZIPF for rank in range(len(names))]
    return random.Random(seed).choices(names, weights, k=NUM_REQUESTS)


def test_ten_requests_for_a_cold_adapter_load_it_once(crowded: LocalFleet) -> None:
    assert all(one["workers"] == {} for one in listed(httpx.Client(base_url=crowded.url)).values())

    def send(i: int) -> str:
        with httpx.Client(base_url=crowded.url, timeout=SETTLE_S) as mine:
            return ask(mine, model="a50", prompt=f"request {i}").worker or ""

    with ThreadPoolExecutor(10) as pool:
        workers = set(pool.map(send, range(10)))
    assert len(workers) == 1
    assert {w: "a50" in held for w, held in engines_own_lists(crowded).items()} == {
        w: w in workers for w in map(str, crowded.workers)
    }


class RoundRobin:
    """The same engines, each request to the next one, in order; what isn't there is loaded, the longest unused goes.

    As SGLang itself does behind a plain load balancer, where the next request for an adapter that was evicted loads it.
    """

    def __init__(self, urls: list[str], folders: dict[str, Path]) -> None:
        self._urls = urls
        self._folders = folders
        self._held: list[OrderedDict[str, int]] = [OrderedDict() for _ in urls]
        self._locks = [threading.Condition() for _ in urls]
        #: whose turn it is at each engine
        self._turns = [0 for _ in urls]
        self.swaps = 0

    def send(self, number: int, name: str) -> float:
        """Wait for the adapter, in seconds."""
        at = number % len(self._urls)
        with httpx.Client(
            base_url=self._urls[at], headers={"Authorization": f"Bearer {ENGINE_KEY}"}, timeout=4 * SETTLE_S
        ) as engine:
            started_s = time.monotonic()
            with self._locks[at]:
                self._locks[at].wait_for(lambda: self._turns[at] == number // len(self._urls), 4 * SETTLE_S)
                self._make_room(at, name, engine)
                self._held[at][name] += 1
                self._turns[at] += 1
                self._locks[at].notify_all()
            waited_s = time.monotonic() - started_s
            body = {"model": f"{SERVED}:{name}", "prompt": f"request {number}", "max_tokens": 2, "temperature": 0}
            answer = engine.post(COMPLETIONS, json=body)
            assert answer.status_code == 200, answer.text
            with self._locks[at]:
                self._held[at][name] -= 1
                self._locks[at].notify_all()
        return waited_s

    def _make_room(self, at: int, name: str, engine: httpx.Client) -> None:
        held = self._held[at]
        if name in held:
            held.move_to_end(name)
            return
        while len(held) >= MAX_LOADED:
            idle = next((one for one, running in held.items() if not running), None)
            if idle is None:
                self._locks[at].wait(SETTLE_S)
                continue
            del held[idle]
            assert engine.post("/unload_lora_adapter", json={"lora_name": idle}).status_code == 200
        body = {"lora_name": name, "lora_path": str(self._folders[name])}
        answer = engine.post("/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        self.swaps += 1
        held[name] = 0


def test_a_hundred_adapters_are_swapped_less_than_half_as_often_as_by_round_robin(
    crowded: LocalFleet, folders: dict[str, Path], record_property: Callable[[str, object], None]
) -> None:
    asked = requests(sorted(folders), seed=3)

    def loads() -> float:
        text = httpx.get(crowded.url + "/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("loray_adapter_loads_total{")]
        assert not any('outcome="failed"' in line for line in lines), lines
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def waits() -> tuple[float, float]:
        text = httpx.get(crowded.url + "/metrics").text.splitlines()
        name = "loray_adapter_wait_seconds_"
        return tuple(  # type: ignore[return-value]  # two of them
            next((float(line.rsplit(" ", 1)[1]) for line in text if line.startswith(name + what)), 0.0)
            for what in ("sum", "count")
        )

    def send(name: str) -> None:
        with httpx.Client(base_url=crowded.url, timeout=4 * SETTLE_S) as mine:
            ask(mine, model=name, prompt=f"request of {name}")

    before, before_s = loads(), waits()[0]
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        list(pool.map(send, asked))
    swaps, waited_s = loads() - before, (waits()[0] - before_s) / NUM_REQUESTS
    assert all(len(held) <= MAX_LOADED for held in engines_own_lists(crowded).values())

    for name in list(folders):
        httpx.post(crowded.url + "/v1/unload_lora_adapter", json={"lora_name": name, "wait_s": 0})
    poll(lambda: not any(engines_own_lists(crowded).values()), what="all unloaded")
    plain = RoundRobin([crowded.engine_url(w) for w in crowded.workers], folders)
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        plain_waits = list(pool.map(plain.send, range(NUM_REQUESTS), asked))

    record_property("swaps_per_request", {"ours": swaps / NUM_REQUESTS, "round_robin": plain.swaps / NUM_REQUESTS})
    record_property("mean_wait_s", {"ours": round(waited_s, 4), "round_robin": round(mean(plain_waits), 4)})
    assert swaps < plain.swaps / 2, (swaps, plain.swaps)
