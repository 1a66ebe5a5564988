"""A model engine on a clock that goes from step to step, and requests for it whose pages are letters."""

from __future__ import annotations

import msgspec

from actors.engine.emulated.model import EngineModel, Job
from actors.engine.emulated.profiles import Profile
from tests.actors.engine.emulated.ledger import PAGE, Ledger, hashes

Request = Job[tuple[int, ...]]
Model = EngineModel[tuple[int, ...]]
PROFILE = Profile(
    name="slow",
    prefill_base_ms=1000,
    prefill_ms_per_token=250,
    attention_ms_per_token_pair=125,
    decode_base_ms=500,
    decode_ms_per_request=125,
    decode_ms_per_context_token=31.25,
    swap_ms=2000,
    kv_tokens=1000,
)
"""All times are exact in binary."""
ONE_TOKEN_S = 1.3125
"""1000 + 250 + 125 * 1/2 ms: the prefill of a prompt of one token."""


def job(pages: str = "", rest: int = 1, *, output: int = 1, adapter: str | None = None) -> Request:
    """A request for a page for each letter, and `rest` tokens more."""
    return Job(hashes(pages, adapter), len(pages) * PAGE + rest, output, adapter)


class Engine:
    """A model, its cache, the clock and what has come out: (time, job, tokens)."""

    def __init__(self, *, num_slots: int = 0, kv_tokens: int = 0, max_steps: int = 64, **profile: float) -> None:
        self.ledger = Ledger()
        self.cache = self.ledger.cache()
        changed = msgspec.structs.replace(PROFILE, **profile)
        self.model = Model(changed, self.cache, num_slots=num_slots, kv_tokens=kv_tokens, max_steps=max_steps)
        self.now_s = 0.0
        self.out: list[tuple[float, Request, int]] = []
        self.ended: list[Request] = []

    def submit(self, *jobs: Request, at_s: float | None = None) -> None:
        """Now, or in `at_s`, before which no step ends."""
        self.now_s = self.now_s if at_s is None else at_s
        assert self.model.next_s is None or self.now_s <= self.model.next_s
        for one in jobs:
            self.model.submit(one, self.now_s)

    def step(self) -> list[tuple[float, Request, int]]:
        """End one step; what came of it."""
        assert self.model.next_s is not None
        self.now_s = self.model.next_s
        output = self.model.advance()
        new = [(self.now_s, one, tokens) for one, tokens in output.tokens]
        self.out += new
        self.ended += output.ended
        return new

    def run(self) -> Engine:
        """To the end of all."""
        while self.model.next_s is not None:
            self.step()
        return self

    def busy_with(self, *jobs: Request) -> Engine:
        """Have jobs come while a prompt of one token is computed, so that all are there for the next step."""
        self.submit(job())
        self.submit(*jobs)
        self.step()
        return self

    def is_at_rest(self) -> bool:
        model, cache = self.model, self.cache
        empty = (model.waiting, model.running, model.pending()) == ([], [], [])
        return empty and model.private_tokens == model.waiting_tokens == 0 and cache.evictable == cache.held
