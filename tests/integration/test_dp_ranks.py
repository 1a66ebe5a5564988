"""One engine with two data-parallel ranks, the second worker of its fleet: ranks 2 and 3."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.integration.asking import CHAT, COMPLETIONS, Answer, ask, noise, user
from tests.integration.event_tap import barrier, tapped
from tests.integration.local_fleet import ADAPTERS, SERVED, LocalFleet

pytestmark = pytest.mark.engine

RANKS = (2, 3)
NUM_TOPICS = 6


@pytest.fixture(scope="module")
def fleet(tiny_model: Path) -> Iterator[LocalFleet]:
    """In place of the shared one."""
    fleet = LocalFleet(tiny_model, num_workers=1, first_index=1, dp_size=2)
    fleet.start()
    yield fleet
    fleet.stop()


def rank_used(answer: Answer) -> int:
    """The engine's own word, as the fleet counts."""
    return RANKS[0] + int(answer.body["choices"][0]["meta_info"]["dp_rank"])


def test_every_rank_is_a_source_of_its_own(fleet: LocalFleet) -> None:
    assert sorted(source.dp_rank for source in fleet.sources()) == list(RANKS)
    endpoints = [e for rank in fleet.ranks().values() for e in (rank.endpoint, rank.replay_endpoint)]
    assert len(set(endpoints)) == 4


def test_the_engine_obeys_and_predictions_are_exact_per_rank(fleet: LocalFleet, client: httpx.Client) -> None:
    rng = random.Random(51)
    models = (SERVED, *ADAPTERS)
    topics = [(models[i % 3], noise(rng, 64 + 16 * i)) for i in range(NUM_TOPICS)]

    def turn(topic: tuple[str, str]) -> Answer:
        return ask(client, CHAT, model=topic[0], messages=user(topic[1]), return_meta_info=True)

    with tapped(fleet) as taps:
        with ThreadPoolExecutor(NUM_TOPICS) as pool:  # at once, so that no rank stays empty
            opened = list(pool.map(turn, topics))
        fleet.settle()
        again = [turn((model, text + noise(rng, 8))) for model, text in topics for _ in range(2)]
        for source, tap in taps.items():
            barrier(fleet, source, tap)
            assert {batch.dp_rank for batch in tap.read()} == {source.dp_rank}
            tokens = [(model, list(f"user: {text}".encode())) for model, text in topics]
            seen = [answer.dp_rank == source.dp_rank for answer in opened]
            assert [bool(tap.stored(ids)) for _, ids in tokens] == seen
    answers = [*opened, *again]
    assert [a.dp_rank for a in answers] == [rank_used(a) for a in answers]
    assert [a.predicted for a in again] == [a.cached for a in again]
    assert all(a.cached >= 64 for a in again)
    assert {a.dp_rank for a in again} == set(RANKS), Counter(a.dp_rank for a in again)


@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
def test_a_client_does_not_choose_the_rank(client: httpx.Client, field: str) -> None:
    prompt = noise(random.Random(field), 50)
    first = ask(client, CHAT, messages=user(prompt), return_meta_info=True)
    other = 1 - rank_used(first) + RANKS[0]
    again = ask(client, CHAT, messages=user(prompt), return_meta_info=True, **{field: other})
    assert rank_used(again) == again.dp_rank == first.dp_rank
    assert again.predicted == again.cached == 64


def test_streams_and_completions_go_to_the_rank_that_holds_their_prefix(client: httpx.Client) -> None:
    prompt = noise(random.Random(52), 70)
    for path, asked in ((CHAT, {"messages": user(prompt)}), (COMPLETIONS, {"prompt": prompt})):
        first = ask(client, path, **asked)
        for stream in (True, False):
            again = ask(client, path, stream=stream, **asked)
            assert again.dp_rank == first.dp_rank
            assert again.predicted == again.cached >= 64


def test_a_flush_empties_both_ranks(fleet: LocalFleet, client: httpx.Client) -> None:
    ask(client, prompt=noise(random.Random(53), 40))
    with fleet.engine("w1") as engine:
        fleet.settle()
        assert engine.post("/flush_cache", params={"timeout": 30}).status_code == 200
    sources = fleet.sources()
    fleet.wait(lambda: not any(fleet.core.ingest.index.num_blocks(s) for s in sources), what="both ranks empty")
