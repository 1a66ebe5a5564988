"""Conversations on two real engines: ours against round robin, in one run. Prints JSON.

    python -m tests.bench.conversations [--cache-tokens N]

Sixteen conversations of six turns over three adapters, a long message first and then short ones, all under way at once,
four requests at a time, on the CPU with the two-layer test model. Each policy starts with empty caches and gets the
same conversations; round robin asks the engines in turn, past the router. By default the two caches together hold all
conversations once, with little to spare, and not twice: what engines are sized for. In caches without end, two engines
in turn compute everything twice at most.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import httpx

from deployment.assets import tiny
from deployment.assets.folder import ensure
from deployment.assets.paths import model_dir
from router.ids import WorkerId
from tests.integration.asking import CHAT
from tests.integration.local_fleet import ENGINE_KEY, SERVED, LocalFleet

MODEL: Final = model_dir(SERVED)
ADAPTERS: Final = {
    "alpha": MODEL / "adapters/adapter-a",
    "bravo": MODEL / "adapters/adapter-b",
    "charlie": MODEL / "adapters/adapter-a",
}
CONVERSATIONS: Final = 16
TURNS: Final = 6
CLIENTS: Final = 4
CACHE_TOKENS: Final = 9_216
OPENING_WORDS: Final = 95
LATER_WORDS: Final = 5
CONTEXT: Final = 2048
WORDS: Final = ("river", "stone", "light", "garden", "winter", "music", "paper", "bridge", "cloud", "silver")

Place = Callable[[], tuple[str, str, str]]
"""Where the next request goes: worker's name where it is known, URL, and the engine's key where one is needed."""


@dataclass
class Tally:
    """What one policy came to."""

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.ttft_s)
        return {
            "requests": len(ordered),
            "ttft_ms_mean": round(sum(ordered) / len(ordered) * 1000, 1),
            "ttft_ms_p90": round(ordered[int(len(ordered) * 0.9)] * 1000, 1),
            "prompt_tokens": self.prompt_tokens,
            "computed_prefill_tokens": self.prompt_tokens - self.cached_tokens,
            "requests_by_worker": dict(self.by_worker),
        }


def _words(rng: random.Random, num: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num))


class Conversation:
    """One of them, turn by turn; its adapter and words are its number's."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(number)
        self._model = list(ADAPTERS)[number % len(ADAPTERS)]
        system = "You are brief. " + _words(random.Random(100 + number % 3), 12)
        self._messages = [{"role": "system", "content": system}]
        self.turns = 0

    def turn(self, place: Place, tally: Tally) -> None:
        """Ask, and remember the answer."""
        said = _words(self._rng, LATER_WORDS if self.turns else OPENING_WORDS)
        self._messages.append({"role": "user", "content": said})
        worker, url, key = place()
        body = {
            "model": f"{SERVED}:{self._model}",
            "messages": self._messages,
            "max_tokens": 16,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started_s, first_s, text, usage = time.monotonic(), 0.0, "", {}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.stream("POST", url + CHAT, json=body, headers=headers, timeout=300) as answer:
            assert answer.status_code == 200, answer.read()
            worker = answer.headers.get("x-loray-worker", worker)
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first_s = first_s or time.monotonic() - started_s
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        self._messages.append({"role": "assistant", "content": text})
        self.turns += 1
        with tally.lock:
            tally.ttft_s.append(first_s)
            tally.prompt_tokens += usage["prompt_tokens"]
            tally.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            tally.by_worker[worker] += 1


def _run(place: Place) -> dict[str, Any]:
    """Any conversation that waits comes next, as people think for a while."""
    tally, rng = Tally(), random.Random(0)
    waiting = [Conversation(number) for number in range(CONVERSATIONS)]

    def client() -> None:
        while True:
            with tally.lock:
                if not waiting:
                    return
                conversation = waiting.pop(rng.randrange(len(waiting)))
            conversation.turn(place, tally)
            with tally.lock:
                if conversation.turns < TURNS:
                    waiting.append(conversation)

    with ThreadPoolExecutor(CLIENTS) as pool:
        for one in [pool.submit(client) for _ in range(CLIENTS)]:
            one.result()
    return tally.figures()


def measure(*, cache_tokens: int = CACHE_TOKENS) -> dict[str, Any]:
    """Both policies, one after the other, and their ratios."""
    ensure(MODEL, tiny.build)
    fleet = LocalFleet(MODEL, num_workers=2, adapters=ADAPTERS, cache_tokens=cache_tokens, context=CONTEXT)
    fleet.start()
    try:
        engines = [(worker, fleet.engine_url(worker), ENGINE_KEY) for worker in map(WorkerId, ("w0", "w1"))]
        turn = count()

        def in_turn() -> tuple[str, str, str]:
            return engines[next(turn) % len(engines)]

        found: dict[str, Any] = {}
        for name, place in (("round_robin", in_turn), ("ours", lambda: ("", fleet.url, ""))):
            for worker, _, _ in engines:
                fleet.with_engine_client(worker, lambda engine: engine.flush_cache(timeout_s=30))
            fleet.settle()
            found[name] = _run(place)
    finally:
        fleet.stop()
    ours, plain = found["ours"], found["round_robin"]
    ratios = {
        name: round(ours[name] / plain[name], 3) for name in ("ttft_ms_mean", "ttft_ms_p90", "computed_prefill_tokens")
    }
    return {
        "conversations": CONVERSATIONS,
        "turns": TURNS,
        "cache_tokens": cache_tokens,
        **found,
        "ours_to_round_robin": ratios,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS, metavar="N", help="of each engine")
    print(json.dumps(measure(cache_tokens=parser.parse_args().cache_tokens), indent=2))


if __name__ == "__main__":
    main()
