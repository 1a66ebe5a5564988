"""Two minutes in which table, router and engines are killed at random under adapter traffic: nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.adapters import engines_own_lists, known_to_router, listed, load, on_shelf, unload
from tests.integration.asking import ask, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet
from tests.integration.test_router_death import Asking, Killable, killable

pytestmark = pytest.mark.engine

__all__ = ["killable"]  # the fixture

CHAOS_S = 120.0
EXTRA = ("chaos-0", "chaos-1")
WHOLE_S = 300.0


@pytest.fixture
def extra(fleet: LocalFleet, client: httpx.Client, shelf: Path) -> Iterator[None]:
    """Two adapters loaded at run time; the fleet is left without them, whatever happens."""
    for i, name in enumerate(EXTRA):
        load(client, name, on_shelf(fleet, shelf, name, seed=200 + i))
        known_to_router(fleet, name, "w0", "w1")
    yield
    fleet.wait_whole(within_s=WHOLE_S)
    for name in EXTRA:
        unload(client, name)
        known_to_router(fleet, name)


@pytest.mark.usefixtures("extra")
def test_whatever_dies_no_request_of_a_client_that_asks_again_is_lost(
    fleet: LocalFleet,
    client: httpx.Client,
    killable: Killable,
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(80)
    poll(killable.serves, what="the router process serves")
    shared = [noise(rng, 64) for _ in range(6)]
    asking = [Asking(url, True, shared) for url in (fleet.url, fleet.url, killable.url)]
    threads = [threading.Thread(target=one.run, args=(seed,)) for seed, one in enumerate(asking)]
    for thread in threads:
        thread.start()

    def kill_table() -> None:
        fleet.run(fleet.port.kill())
        asking[0].ended.wait(rng.uniform(0.5, 3.0))
        fleet.run(fleet.port.revive())

    def kill_router() -> None:
        killable.kill()
        killable.start()

    def kill_engine() -> None:
        pid = fleet.call(lambda: rng.choice(list(fleet.workers.values())).life.pid)
        if pid is not None and psutil.pid_exists(pid):
            psutil.Process(pid).kill()

    deaths: list[str] = []
    until_s = time.monotonic() + CHAOS_S
    while time.monotonic() < until_s:
        death = rng.choice([kill_table, kill_table, kill_router, kill_router, kill_engine])
        death()
        deaths.append(death.__name__)
        asking[0].ended.wait(rng.uniform(1.0, 8.0))
    before = [one.answers for one in asking]
    fleet.wait_whole(within_s=WHOLE_S)
    poll(
        lambda: any(o.error for o in asking) or all(o.answers > b for o, b in zip(asking, before, strict=True)),
        within_s=WHOLE_S,
        what="all go on",
    )
    for one in asking:
        one.ended.set()
    for thread in threads:
        thread.join(2 * SETTLE_S)

    record_property("deaths", {name: deaths.count(name) for name in sorted(set(deaths))})
    record_property("answers", sum(one.answers for one in asking))
    record_property("asked_again", sum(one.again for one in asking))
    assert [one.error for one in asking] == [None] * len(asking)
    for name in EXTRA:
        known_to_router(fleet, name, "w0", "w1")
    assert set(listed(client)) == {*ADAPTERS, *EXTRA}
    assert engines_own_lists(fleet) == {worker: {*ADAPTERS, *EXTRA} for worker in ("w0", "w1")}
    fleet.settle()
    for url in (fleet.url, killable.url):
        clean = poll(
            lambda url=url: (a := httpx.post(url + "/loray/audit", timeout=SETTLE_S).json())["clean"] and a,
            what="a clean audit",
        )
        assert (clean["ghosts"], clean["missing"]) == (0, 0)
    answer = ask(client, model=EXTRA[0], prompt=shared[0])
    again = ask(client, model=EXTRA[0], prompt=shared[0])
    assert (answer.predicted, again.predicted) == (answer.cached, again.cached)
    assert ask(client, model=SERVED, prompt="the base too").text is not None
