"""Failover: who is suspended and why, how it comes back, and what becomes of requests that wait there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from router.decision import Decision, RouteRequest
from router.health import MIN_STALL_S
from router.ids import SourceId, WorkerId
from router.net.engine_probe import ProbeError
from router.net.failover import Attempt, Failover
from tests.router.fleet import Fleet, report, request, source
from tests.router.net.virtual_time import START_S, moment, virtual_time

W0, W1 = WorkerId("w0"), WorkerId("w1")
LOOK_S = 0.5
"""Pace at which attempts are looked at."""
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 5.0)
"""Before the probes of a suspended worker."""
FOREVER_S = 10_000.0


class Ward:
    """Two workers, and engines that answer probes as they are told."""

    def __init__(self, *, ranks: tuple[int, ...] = (0,)) -> None:
        self.fleet = Fleet()
        self.fleet.start(report("w0", ranks=ranks), report("w1", ranks=ranks))
        self.core = self.fleet.core
        self.failover = Failover(self.core, probe=self.probe)
        #: engines that answer with an error
        self.failing: set[SourceId] = set()
        #: how long an engine takes for a probe
        self.takes_s: dict[SourceId, float] = {}
        #: probes: when, and whom
        self.probes: list[tuple[float, SourceId]] = []

    async def probe(self, asked: SourceId, wanted: RouteRequest) -> int:
        assert wanted.num_tokens > 0
        self.probes.append((since_start(), asked))
        await asyncio.sleep(self.takes_s.get(asked, 0.0))
        if asked in self.failing:
            raise ProbeError("HTTP 500")
        return 0

    @property
    def probed_s(self) -> list[float]:
        return [at_s for at_s, _ in self.probes]

    def fail(self, worker_id: WorkerId, times: int = 3) -> None:
        for _ in range(times):
            self.failover.failed(worker_id)

    def hear(self, worker_id: WorkerId) -> None:
        """More of a stream comes from the worker."""
        with self.failover.attempt(self.decision(worker_id)) as attempt:
            self.failover.heard(attempt)

    def suspended(self) -> set[str]:
        return {worker_id for worker_id, record in self.core.workers.items() if record.suspended}

    def chosen(self) -> set[str]:
        return {self.core.route(request()).source.worker_id for _ in range(32)}

    def decision(self, worker_id: WorkerId = W0, cost_ms: float = 1.0) -> Decision:
        others = {other for other in (W0, W1) if other != worker_id}
        return replace(self.core.route(request(exclude=others)), cost_ms=cost_ms)

    def wait_for_a_byte(self, decision: Decision) -> asyncio.Task[float]:
        """A request at an engine that never answers; ends, with the time, when it is given up."""

        async def waiting() -> float:
            with self.failover.attempt(decision) as attempt:
                with pytest.raises(TimeoutError):
                    await silence(attempt)
                return since_start()

        return asyncio.ensure_future(waiting())

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While attempts are looked at; nothing is left afterwards."""
        watching = asyncio.ensure_future(self.failover.run())
        try:
            yield
            assert not watching.done()
        finally:
            watching.cancel()
            await self.failover.close()
            await moment()
            assert asyncio.all_tasks() == {asyncio.current_task()}


async def silence(attempt: Attempt) -> None:
    async with asyncio.timeout(None) as limit:
        attempt.end = lambda: limit.reschedule(time.monotonic())
        await asyncio.sleep(FOREVER_S)


def since_start() -> float:
    return round(time.monotonic() - START_S, 2)


async def until(at_s: float) -> None:
    await asyncio.sleep(START_S + at_s - time.monotonic())


def sums(*pauses_s: float) -> list[float]:
    return [sum(pauses_s[: i + 1]) for i in range(len(pauses_s))]


# -- failures ----------------------------------------------------------------------------------------------------


@virtual_time
async def test_three_failures_in_a_row_suspend_a_worker() -> None:
    ward = Ward()
    async with ward.watched():
        ward.fail(W0, 2)
        assert (ward.suspended(), ward.chosen(), ward.failover.suspensions) == (set(), {"w0", "w1"}, 0)
        ward.fail(W0, 1)
        assert (ward.suspended(), ward.chosen(), ward.failover.suspensions) == ({"w0"}, {"w1"}, 1)
        ward.fail(W0, 4)
        assert ward.failover.suspensions == 1


@pytest.mark.parametrize("between", ["answered", "nothing", "heard", "another"])
@virtual_time
async def test_only_an_answer_of_its_own_resets_the_count(between: str) -> None:
    ward = Ward()
    async with ward.watched():
        ward.fail(W0, 2)
        if between == "another":
            ward.failover.answered(W1)
        elif between == "answered":
            ward.failover.answered(W0)
        elif between == "heard":
            ward.hear(W0)
        ward.fail(W0, 1)
        assert ward.suspended() == (set() if between == "answered" else {"w0"})
        if between == "answered":
            ward.fail(W0, 2)
            assert ward.suspended() == {"w0"}


@virtual_time
async def test_failures_of_a_worker_that_is_gone_are_nothing() -> None:
    ward = Ward()
    async with ward.watched():
        ward.core.forget(W0)
        ward.fail(W0, 5)
        await until(30.0)
        assert (ward.failover.suspensions, ward.probes) == (0, [])


# -- probing -----------------------------------------------------------------------------------------------------


@virtual_time
async def test_a_suspended_worker_is_probed_and_back_once_it_is_well() -> None:
    ward = Ward()
    async with ward.watched():
        ward.fail(W0)
        await until(0.49)
        assert (ward.probes, ward.suspended()) == ([], {"w0"})
        await until(0.51)
        assert (ward.probes, ward.suspended(), ward.chosen()) == ([(0.5, source("w0"))], set(), {"w0", "w1"})
        await until(60.0)
        assert len(ward.probes) == 1


@virtual_time
async def test_probes_of_a_worker_that_stays_ill_become_rarer_and_never_end() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        ward.fail(W0)
        await until(sums(*PAUSES_S)[-1] + 0.1)
        assert ward.probed_s == pytest.approx(sums(*PAUSES_S), abs=0.02)
        assert (ward.suspended(), ward.failover.suspensions) == ({"w0"}, 1)
        ward.failing = set()
        await until(sums(*PAUSES_S, 5.0)[-1] + 0.1)
        assert ward.suspended() == set()


@virtual_time
async def test_once_well_its_failures_are_forgotten_and_it_can_be_suspended_again() -> None:
    ward = Ward()
    async with ward.watched():
        ward.fail(W0)
        await until(1.0)
        ward.fail(W0, 2)
        assert ward.suspended() == set()
        ward.fail(W0, 1)
        assert ward.suspended() == {"w0"}
        await until(2.0)
        assert (ward.probed_s, ward.suspended(), ward.failover.suspensions) == ([0.5, 1.5], set(), 2)


@virtual_time
async def test_a_worker_is_well_only_if_all_its_ranks_are() -> None:
    ward = Ward(ranks=(0, 1))
    async with ward.watched():
        ward.failing = {source("w0", rank=1)}
        ward.fail(W0)
        await until(2.0)
        assert [asked for _, asked in ward.probes] == [source("w0"), source("w0", rank=1)] * 2
        assert ward.suspended() == {"w0"}
        ward.failing = set()
        await until(4.0)
        assert ward.suspended() == set()


@virtual_time
async def test_a_probe_that_is_not_answered_came_to_nothing() -> None:
    ward = Ward()
    async with ward.watched():
        ward.takes_s = {source("w0"): FOREVER_S}
        ward.fail(W0)
        await until(30.0)
        assert ward.probed_s == pytest.approx([0.5, 0.5 + MIN_STALL_S + 1.0, 0.5 + 2 * MIN_STALL_S + 3.0], abs=0.02)
        assert ward.suspended() == {"w0"}


@virtual_time
async def test_a_probe_has_time_to_wait_behind_the_prompts_before_it() -> None:
    ward = Ward()
    async with ward.watched():
        column = ward.core.ingest.column(source("w0"))
        ward.core.load.book(column, tokens=20_000, lora_id=None, now_s=time.monotonic())
        assert ward.core.load.queued_ms[column] > 3900
        ward.takes_s = {source("w0"): 19.0}
        ward.fail(W0)
        await until(0.5 + 19.1)
        assert (len(ward.probes), ward.suspended()) == (1, set())


@virtual_time
async def test_closing_ends_all_probing() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        ward.takes_s = {source("w1"): FOREVER_S}
        ward.fail(W0)
        ward.fail(W1)
        await until(3.0)
    num_probes = len(ward.probes)
    await asyncio.sleep(60.0)
    assert len(ward.probes) == num_probes


# -- attempts without a byte -------------------------------------------------------------------------------------


@virtual_time
async def test_an_overdue_attempt_has_the_worker_probed_and_is_given_up_if_that_fails() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        first, second = (ward.wait_for_a_byte(ward.decision()) for _ in range(2))
        other = ward.wait_for_a_byte(ward.decision(W1))
        await until(MIN_STALL_S - 0.1)
        assert ward.probes == []
        given_up_s = [await first, await second]
        assert given_up_s == pytest.approx([MIN_STALL_S + LOOK_S] * 2, abs=LOOK_S)
        assert (ward.suspended(), ward.chosen(), other.done()) == ({"w0"}, {"w1"}, False)
        ward.failing = set()
        await asyncio.sleep(2.0)
        assert ward.suspended() == set()
        other.cancel()


@virtual_time
async def test_a_worker_that_stands_still_is_given_up_when_the_probe_is_overdue_too() -> None:
    ward = Ward()
    async with ward.watched():
        ward.takes_s = {source("w0"): FOREVER_S}
        waiting = ward.wait_for_a_byte(ward.decision())
        await until(2 * MIN_STALL_S - 0.1)
        assert (ward.suspended(), waiting.done()) == (set(), False)
        assert await waiting == pytest.approx(2 * MIN_STALL_S + LOOK_S, abs=LOOK_S)
        assert ward.suspended() == {"w0"}


@virtual_time
async def test_where_all_stand_still_what_waits_is_left_to_the_first_that_goes_on() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0"), source("w1")}
        waiting = [ward.wait_for_a_byte(ward.decision()), ward.wait_for_a_byte(ward.decision(W1))]
        await until(8 * MIN_STALL_S)
        assert ward.suspended() == {"w0", "w1"}
        assert sum(one.done() for one in waiting) <= 1  # the first, while the other was thought well
        ward.failing = {source("w1")}
        await until(10 * MIN_STALL_S)
        assert ward.suspended() == {"w1"}
        assert waiting[1].done(), "there is somewhere to go again"
        waiting[0].cancel()


@virtual_time
async def test_a_busy_worker_that_answers_its_probe_is_left_alone_and_not_probed_all_the_time() -> None:
    ward = Ward()
    async with ward.watched():
        ward.takes_s = {source("w0"): 9.0}
        waiting = ward.wait_for_a_byte(ward.decision())
        await until(100.0)
        assert (ward.suspended(), ward.failover.suspensions, waiting.done()) == (set(), 0, False)
        pauses_s = [later - at_s for at_s, later in zip(ward.probed_s, ward.probed_s[1:], strict=False)]
        assert pauses_s == pytest.approx([19.25] * 4, abs=0.3)
        waiting.cancel()


@virtual_time
async def test_what_was_expected_to_take_long_is_overdue_later() -> None:
    ward = Ward()
    async with ward.watched():
        waiting = ward.wait_for_a_byte(ward.decision(cost_ms=4000.0))
        await until(21.0)
        assert ward.probed_s == pytest.approx([20.25], abs=0.3)
        waiting.cancel()


@virtual_time
async def test_a_worker_that_is_heard_is_not_doubted() -> None:
    ward = Ward()
    async with ward.watched():
        waiting = ward.wait_for_a_byte(ward.decision())
        for at_s in range(0, 60, 9):
            await until(at_s)
            ward.hear(W0)
        await until(63.0)
        assert ward.probes == []
        await until(65.0)
        assert len(ward.probes) == 1
        waiting.cancel()


@virtual_time
async def test_an_attempt_that_has_ended_is_not_watched() -> None:
    ward = Ward()
    async with ward.watched():
        waiting = ward.wait_for_a_byte(ward.decision())
        await moment()
        waiting.cancel()
        await until(60.0)
        assert ward.probes == []


@virtual_time
async def test_an_attempt_that_may_not_be_ended_stays() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        with ward.failover.attempt(ward.decision()) as attempt:
            assert attempt.end is None
            await until(15.0)
            assert ward.suspended() == {"w0"}


@virtual_time
async def test_when_all_are_suspended_requests_go_to_them_all_the_same() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0"), source("w1")}
        ward.fail(W0)
        ward.fail(W1)
        await until(5.0)
        assert (ward.suspended(), ward.chosen()) == ({"w0", "w1"}, {"w0", "w1"})


# -- lives -------------------------------------------------------------------------------------------------------


@virtual_time
async def test_another_life_is_not_suspended_and_not_probed_for_its_predecessor() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        ward.fail(W0)
        await until(1.0)
        ward.fleet.start(report("w0", "i2"))
        assert (ward.suspended(), ward.chosen()) == (set(), {"w0", "w1"})
        await until(5.0)
        num_probes = len(ward.probes)
        await until(60.0)
        assert (len(ward.probes), ward.suspended()) == (num_probes, set())
        assert [asked for at_s, asked in ward.probes if at_s > 1.0 and asked == source("w0")] == []


# -- retries -----------------------------------------------------------------------------------------------------


@virtual_time
async def test_its_budget_is_that_of_retries() -> None:
    ward = Ward()
    ward.failover.budget.asked(time.monotonic())
    taken = [ward.failover.budget.take(time.monotonic()) for _ in range(200)]
    assert sum(taken) == 101
