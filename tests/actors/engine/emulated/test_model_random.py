"""Any history of the engine model: all that isn't aborted is served in full, and nothing stays locked behind it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.actors.engine.emulated.driving import Engine, Request, job
from tests.actors.engine.emulated.ledger import PAGE

TICK_S = 1 / 8
"""Exact in binary, as all times of the profile are."""
MAX_ADVANCES = 3000
"""Far more than what can wait needs."""


class AnyHistory(RuleBasedStateMachine):
    """Requests come and are aborted whenever they like."""

    @initialize(
        num_slots=st.integers(0, 3),
        kv_tokens=st.sampled_from([40, 64, 1000]),
        chunk_tokens=st.sampled_from([3, 8, 100]),
        max_running=st.sampled_from([1, 2, 256]),
        max_steps=st.sampled_from([1, 3, 64]),
    )
    def start(self, num_slots: int, kv_tokens: int, chunk_tokens: int, max_running: int, max_steps: int) -> None:
        self.num_slots = num_slots
        self.max_running = max_running
        self.engine = Engine(
            num_slots=num_slots,
            kv_tokens=kv_tokens,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            max_steps=max_steps,
        )
        self.jobs: list[Request] = []
        #: those that were in a batch once
        self.admitted: list[Request] = []
        self.idle_s = 0.0

    @rule(
        pages=st.text("ab", max_size=4),
        rest=st.integers(0, PAGE - 1),
        output=st.integers(1, 12),
        adapter=st.sampled_from([None, "x", "y", "z"]),
    )
    def submit(self, pages: str, rest: int, output: int, adapter: str | None) -> None:
        one = job(pages, rest if pages else max(1, rest), output=output, adapter=adapter)
        self.jobs.append(one)
        self.engine.submit(one)

    @rule(num_ticks=st.integers(1, 40))
    def wait(self, num_ticks: int) -> None:
        until_s = self.engine.now_s + num_ticks * TICK_S
        if self.engine.model.next_s is None:
            self.idle_s += num_ticks * TICK_S
        else:
            until_s = min(until_s, self.engine.model.next_s)
        self.engine.now_s = until_s

    @precondition(lambda self: self.engine.model.next_s is not None)
    @rule()
    def advance(self) -> None:
        before_s = self.engine.now_s
        num_ended = len(self.engine.ended)
        tokens = self.engine.step()
        jobs = [one for _, one, _ in tokens]
        assert self.engine.now_s >= before_s
        assert self.engine.model.busy_s + self.idle_s == self.engine.now_s
        assert len(set(map(id, jobs))) == len(jobs)
        assert all(num_tokens > 0 and not one.aborted for _, one, num_tokens in tokens)
        assert self.engine.ended[num_ended:] == [one for one in jobs if one.emitted == one.max_output]

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        self.engine.model.abort(self.jobs[which % len(self.jobs)], self.engine.now_s)

    @invariant()
    def time_goes_on_while_there_is_work(self) -> None:
        model = self.engine.model
        assert model.next_s is None or model.next_s >= self.engine.now_s
        assert (model.next_s is None) == (not self.inside() and not model.waiting)
        assert model.busy_s <= self.engine.now_s

    @invariant()
    def nothing_is_in_two_places(self) -> None:
        model = self.engine.model
        assert all(one.lock is None for one in model.waiting)
        assert set(map(id, model.running)) <= set(map(id, self.inside()))
        assert model.is_prefilling == (len(self.inside()) > len(model.running))

    @invariant()
    def adapters_fit_their_slots(self) -> None:
        assert not self.num_slots or len({one.adapter for one in self.inside()}) <= self.num_slots

    @invariant()
    def no_more_run_than_may(self) -> None:
        assert len(self.inside()) <= self.max_running

    @invariant()
    def memory_suffices(self) -> None:
        model, cache = self.engine.model, self.engine.cache
        assert cache.held + model.private_tokens <= model.kv_tokens
        assert 0 <= cache.evictable <= cache.held
        needed = sum(one.num_tokens + one.max_output for one in self.inside())
        assert model.private_tokens == needed - sum(one.done // PAGE * PAGE for one in self.inside())

    @invariant()
    def first_come_first_served(self) -> None:
        self.admitted += [one for one in self.jobs if one.lock is not None and one not in self.admitted]
        waiting = self.engine.model.waiting
        for i, one in enumerate(self.jobs):
            if one in waiting:
                after = [each for each in self.jobs[i:] if not self.num_slots or each.adapter == one.adapter]
                assert not [each for each in after if each in self.admitted]

    @invariant()
    def a_request_counts_right(self) -> None:
        given = {id(one): 0 for one in self.jobs}
        for _, one, num_tokens in self.engine.out:
            given[id(one)] += num_tokens
        for one in self.jobs:
            assert one.emitted == given[id(one)] <= one.max_output
            assert 0 <= one.cached <= one.num_tokens - 1
            assert one.cached <= one.done <= one.num_tokens
            assert one.emitted == 0 or one.done == one.num_tokens

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MAX_ADVANCES):
            if self.engine.model.next_s is None:
                break
            self.advance()
            self.memory_suffices()
            self.adapters_fit_their_slots()
            self.first_come_first_served()
        assert self.engine.model.next_s is None
        self.a_request_counts_right()
        assert all(one.aborted or one.emitted == one.max_output for one in self.jobs)
        assert sorted(map(id, self.engine.ended)) == sorted(
            id(one) for one in self.jobs if one.emitted == one.max_output
        )
        assert self.engine.is_at_rest()
        if not any(one.aborted for one in self.jobs):
            assert self.engine.model.computed_tokens == sum(one.num_tokens - one.cached for one in self.jobs)

    def inside(self) -> list[Request]:
        """Running, or in the batch whose prompts are computed."""
        return [one for one in self.jobs if one.lock is not None]


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40, derandomize=True, database=None
)
