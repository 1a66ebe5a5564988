"""Case 33 on a fleet of emulated engines: clients that leave anywhere leave nothing behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.adapters.entry import Placement
from deployment.assets.tiny import make_adapter
from router.admission import AdmissionConfig
from tests.integration.asking import CHAT, COMPLETIONS, ask, noise, user
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.crowd import Crowd, Wish, crowd
from tests.integration.emulated_fleet import EmulatedFleet
from tests.integration.local_fleet import SERVED

pytestmark = pytest.mark.engine

NUM_LEAVING = 1000
NAMES = tuple(f"cold-{i:02}" for i in range(24))
"""More adapters than the fleet keeps loaded: some are always cold."""


@pytest.fixture(scope="module")
def four(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedFleet]:
    shelf = tmp_path_factory.mktemp("leaving")
    adapters = {name: make_adapter(tiny_model, shelf / name, seed=i, rank=4) for i, name in enumerate(NAMES)}
    fleet = EmulatedFleet(
        tiny_model,
        num_workers=4,
        adapters=adapters,
        placement=Placement.ON_DEMAND,
        max_loaded=4,
        cache_tokens=16_384,
    )
    fleet.start()
    yield fleet
    fleet.stop()


def test_case_33_a_thousand_clients_that_leave_anywhere_leave_nothing_behind(four: EmulatedFleet) -> None:
    """While queued, for a room or an adapter, before the answer, in its midst, at its end; others are served on."""
    tight = AdmissionConfig(max_queued=400, max_engine_queue_ms=60.0)
    rng = random.Random(33)
    seen: Counter[str] = Counter()

    def wish() -> Wish:
        body: dict[str, Any] = {
            "model": rng.choice((SERVED, *NAMES)),
            "prompt": noise(rng, rng.randrange(1, 400)),
            "max_tokens": rng.choice((1, 20, 200)),
            "ignore_eos": True,
            "stream": rng.random() < 0.6,
        }
        path = rng.choice((COMPLETIONS, COMPLETIONS, CHAT))
        if path == CHAT:
            body["messages"] = user(body.pop("prompt"))
        return Wish(body, path, {"x-loray-priority": rng.choice(("high", "normal", "low"))})

    async def leave(clients: Crowd, wanted: Wish, patience_s: float, num_chunks: int) -> None:
        """Stays for so long, or so many chunks."""
        where = "before the answer"
        try:
            async with asyncio.timeout(patience_s), clients.stream(wanted) as answer:
                assert answer.status in (200, 429), await answer.text()
                where = "in its midst" if answer.status == 200 else "refused"
                for _ in range(num_chunks):
                    if not await answer.content.readany():
                        where = "at its end"
                        break
        except TimeoutError:
            pass
        seen[where] += 1

    async def leaving(router: Any, url: str) -> None:
        looking = True

        async def look() -> None:
            while looking:
                await asyncio.sleep(0.01)
                at_adapters = await asyncio.to_thread(four.call, lambda: sum(router._gate.waiting.values()))
                seen["queued"] = max(seen["queued"], await asyncio.to_thread(four.queued, router))
                seen["cold"] = max(seen["cold"], at_adapters)

        async with crowd(url) as clients:
            watch = asyncio.ensure_future(look())
            turn = asyncio.Semaphore(150)

            async def one(wanted: Wish, patience_s: float, num_chunks: int) -> None:
                async with turn:
                    await leave(clients, wanted, patience_s, num_chunks)

            points = [(wish(), rng.uniform(0.0, 1.0) ** 2 * 3, rng.randrange(8)) for _ in range(NUM_LEAVING)]
            await asyncio.gather(*(one(*point) for point in points))
            looking = False
            await watch

    with four.router_with(tight) as (router, url):
        asyncio.run(leaving(router, url))
        four.wait_at_rest(router)
        assert not router._dispatcher._tasks or poll(lambda: not router._dispatcher._tasks, what="aborts are done")
        text = httpx.get(url + "/metrics", timeout=SETTLE_S).text
        for gauge in ("loray_queued_requests", "loray_adapter_waiting_requests"):
            assert f"\n{gauge} 0.0\n" in text
        with httpx.Client(base_url=url, timeout=SETTLE_S) as client:
            assert {ask(client, prompt=noise(rng, 30)).prompt_tokens for _ in range(4)} == {30}
            assert ask(client, model=NAMES[-1], prompt="still here?").worker
            four.wait_at_rest(router)
    assert min(seen[where] for where in ("before the answer", "in its midst", "queued", "cold")) > 20, seen
