"""The promise: what the router predicts is what the engine reports, token for token."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from actors.engine.client import EngineError
from router.ids import WorkerId
from tests.integration.asking import CHAT, COMPLETIONS, Answer, ask, noise, user
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.event_tap import EventTap, barrier, tapped
from tests.integration.local_fleet import ADAPTERS, CACHE_TOKENS, PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NUM_REQUESTS = 64
FLUSH_AT = 40
PREFIX_CHARS = (130, 256, 400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """One request of the mix, and what a reader of a failure wants to know."""

    path: str
    model: str
    fields: dict[str, Any]

    def send(self, client: httpx.Client) -> Answer:
        return ask(client, self.path, model=self.model, **self.fields)


def mix(seed: int, count: int) -> list[Mixed]:
    """Shared prefixes under every name, salt and key, as text, chats and token ids, streamed and not."""
    rng = random.Random(seed)
    prefixes = [noise(rng, length) for length in PREFIX_CHARS]
    requests = []
    for _ in range(count):
        text = rng.choice(prefixes) + noise(rng, rng.choice((0, 1, 16, 17, 60, 150)))
        kind = rng.choice(("text", "ids", "chat", "chat-ids"))
        prompt = {
            "text": {"prompt": text},
            "ids": {"prompt": list(text.encode())},
            "chat": {"messages": [{"role": "system", "content": "Be brief."}, *user(text)]},
            "chat-ids": {"messages": user("(see input_ids)"), "input_ids": list(text.encode())},
        }[kind]
        names = {
            "cache_salt": rng.choice((*[None] * 6, "", "salt-1")),
            "extra_key": rng.choice((*[None] * 6, "", "key-1")),
        }
        requests.append(
            Mixed(
                path=CHAT if kind.startswith("chat") else COMPLETIONS,
                model=rng.choice((SERVED, *ADAPTERS, f"{SERVED}:{ADAPTERS[0]}")),
                fields={
                    **prompt,
                    **{name: value for name, value in names.items() if value is not None},
                    "max_tokens": rng.randint(1, 6),
                    "stream": rng.random() < 0.5,
                },
            )
        )
    return requests


def test_every_prediction_of_a_mix_with_evictions_and_flushes_is_exact(fleet: LocalFleet, client: httpx.Client) -> None:
    wrong: list[tuple[int, Answer, Mixed]] = []
    hits: Counter[str] = Counter()
    num_tokens = 0
    with tapped(fleet) as taps:
        fleet.settle()
        for i, request in enumerate(mix(7, NUM_REQUESTS)):
            if i == FLUSH_AT:
                flush_everywhere(fleet)
            answer = request.send(client)
            if answer.predicted != answer.cached:
                wrong.append((i, answer, request))
            hits[request.model] += answer.cached > 0
            num_tokens += answer.prompt_tokens
        for source, tap in taps.items():
            barrier(fleet, source, tap)
        removed = [sum(len(e["block_hashes"]) for e in tap.events("BlockRemoved")) for tap in taps.values()]
    assert wrong == []
    assert num_tokens > 2 * CACHE_TOKENS
    assert any(removed), "no evictions"
    assert all(hits[model] for model in (SERVED, *ADAPTERS)), hits
    fleet.settle()
    stats = fleet.call(lambda: [fleet.core.ingest.stats(s) for r in fleet.core.workers.values() for s in r.sources])
    assert [(s.bad, s.missing) for s in stats] == [(0, 0)] * len(fleet.workers)
    assert all(s.cleared for s in stats)


@pytest.mark.parametrize("num_tokens", [PAGE, 4 * PAGE - 1, 4 * PAGE, 4 * PAGE + 1])
def test_the_last_token_of_a_fully_cached_prompt_is_computed_again(client: httpx.Client, num_tokens: int) -> None:
    prompt = noise(random.Random(num_tokens), num_tokens)
    first = ask(client, prompt=prompt, cache_salt="boundary")
    again = ask(client, prompt=prompt, cache_salt="boundary")
    longer = ask(client, prompt=prompt + "#", cache_salt="boundary")
    assert (first.predicted, first.cached) == (0, 0)
    assert again.predicted == again.cached == (num_tokens - 1) // PAGE * PAGE
    assert longer.predicted == longer.cached == num_tokens // PAGE * PAGE


def test_a_second_turn_finds_the_first_turns_output(client: httpx.Client) -> None:
    opening = noise(random.Random(1), 50)
    first = ask(client, prompt=opening, max_tokens=40, ignore_eos=True)
    assert first.text.isascii(), "the tiny model's output must survive a round trip through text"
    second = ask(client, prompt=opening + first.text + noise(random.Random(2), 10))
    assert second.worker == first.worker
    assert second.predicted == second.cached == (50 + 40 - 1) // PAGE * PAGE


def test_without_a_pause_nearly_every_prediction_is_exact_and_none_too_high(fleet: LocalFleet) -> None:
    """A client that asks on at once can overtake events that are on their way, where threads wait for a core."""
    rng = random.Random(5)
    answers: list[Answer] = []
    with httpx.Client(base_url=fleet.url, timeout=SETTLE_S) as client:
        for _ in range(12):
            prompt = noise(rng, 50)
            answers += [ask(client, prompt=prompt + noise(rng, 20)) for _ in range(3)]
    fleet.settle()
    errors = [(a.predicted or 0) - a.cached for a in answers]
    assert max(errors) == 0
    assert errors.count(0) >= 0.8 * len(errors), errors


def test_an_engine_that_is_never_idle_publishes_output_blocks_before_its_answer(
    fleet: LocalFleet, client: httpx.Client
) -> None:
    """Left alone, SGLang would wait for an idle moment or 40 steps, and the next turn of a chat come too early."""
    rng = random.Random(4)
    conversation = noise(rng, 40)
    worker = ask(client, prompt=conversation).worker or ""
    asked = {"model": SERVED, "prompt": noise(rng, 20), "max_tokens": 900, "ignore_eos": True, "stream": True}
    lateness_s = []
    answers = []
    with (
        tapped(fleet) as taps,
        fleet.engine(worker) as engine,
        engine.stream("POST", COMPLETIONS, json=asked) as beside,
    ):
        chunks = beside.iter_raw()
        next(chunks)
        tap = next(tap for source, tap in taps.items() if source.worker_id == worker)
        for _ in range(4):
            answers.append(ask(client, prompt=conversation, max_tokens=20, ignore_eos=True))
            answered_s = time.time()
            conversation += answers[-1].text
            page = list(conversation.encode())[: (len(conversation) - 1) // PAGE * PAGE][-PAGE:]
            poll(lambda page=page: stored_s(tap, page), what="output block heard")
            lateness_s.append(stored_s(tap, page) - answered_s)
        assert fleet.running(worker), "nothing ran beside it"
    poll(lambda: fleet.running(worker) == 0, what="the other request gone")
    assert max(lateness_s) < 0
    assert [(a.worker, a.predicted, a.cached) for a in answers] == [(worker, n, n) for n in (32, 48, 64, 96)]


def stored_s(tap: EventTap, page: list[int]) -> float:
    """When a store that ends with this page was published, by the machine's clock; 0 if it wasn't."""
    stores = [(b.ts, e) for b in tap.read() for e in b.events if e["type"] == "BlockStored"]
    return next((ts for ts, e in stores if list(e["token_ids"])[-PAGE:] == page), 0.0)


def test_a_flushed_fleet_predicts_nothing(fleet: LocalFleet, client: httpx.Client) -> None:
    prompt = noise(random.Random(3), 100)
    ask(client, prompt=prompt)
    assert ask(client, prompt=prompt).cached == 96
    flush_everywhere(fleet)
    answer = ask(client, prompt=prompt)
    assert (answer.predicted, answer.cached) == (0, 0)


def flushed(fleet: LocalFleet, worker_id: WorkerId) -> bool:
    """Whether the engine took it: for a moment after an answer its request still counts as running."""
    try:
        fleet.run(fleet.workers[worker_id].flush_cache())
    except EngineError:
        return False
    return True


def flush_everywhere(fleet: LocalFleet) -> None:
    """Flush each engine, once its last request is out of its batch; the router has heard when this returns."""
    for source in fleet.sources():
        before = fleet.call(lambda source=source: fleet.core.ingest.stats(source).cleared)
        poll(lambda source=source: flushed(fleet, source.worker_id), what="flush")
        fleet.wait(
            lambda source=source, before=before: fleet.core.ingest.stats(source).cleared > before, what="flush heard"
        )
