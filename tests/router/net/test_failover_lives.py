"""Failover across lives of a worker, and for requests that wait at one that is suspended already."""

from __future__ import annotations

import asyncio

import pytest

from router.health import MIN_STALL_S
from router.reports import WorkerState
from tests.router.fleet import report, source
from tests.router.net.test_failover import FOREVER_S, LOOK_S, W0, Ward, since_start, until
from tests.router.net.virtual_time import moment, virtual_time

LATE_S = 60.0


@pytest.mark.parametrize("ends_s", [1.0, 2.0], ids=["between probes", "during one"])
@virtual_time
async def test_the_end_of_a_life_ends_its_probing_and_leaves_the_next_alone(ends_s: float) -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0"), source("w0", "i2")}
        ward.takes_s = {source("w0"): 1.0}
        ward.fail(W0)
        await until(ends_s + 0.2)
        ward.fleet.start(report("w0", "i2"))
        num_probes = len(ward.probes)
        await until(LATE_S)
        assert (ward.suspended(), ward.failover.suspensions, len(ward.probes)) == (set(), 1, num_probes)


@pytest.mark.parametrize("takes_s", [0.0, 9.0], ids=["between probes", "during one"])
@virtual_time
async def test_a_worker_that_is_removed_is_probed_no_more(takes_s: float) -> None:
    ward = Ward(ranks=(0, 1))
    async with ward.watched():
        ward.failing = {source("w0", rank=1)}
        ward.takes_s = dict.fromkeys((source("w0"), source("w0", rank=1)), takes_s)
        ward.fail(W0)
        await until(1.2)
        ward.core.forget(W0)
        num_probes = len(ward.probes)
        await until(LATE_S)
        assert len(ward.probes) == num_probes


@virtual_time
async def test_a_life_that_fails_while_its_predecessor_is_still_probed_is_probed_and_comes_back() -> None:
    ward = Ward()
    async with ward.watched():
        ward.takes_s = {source("w0"): FOREVER_S}
        ward.fail(W0)
        await until(1.0)
        ward.fleet.start(report("w0", "i2"))
        ward.fail(W0)
        assert ward.suspended() == {"w0"}
        await until(2.0)
        assert ward.suspended() == set()


@virtual_time
async def test_a_life_answers_for_its_own_failures_only() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        ward.fail(W0)
        ward.fleet.start(report("w0", "i2", state=WorkerState.STARTING))
        ward.fleet.core.report(report("w0", "i2"))
        ward.fail(W0, 2)
        assert ward.suspended() == set()
        ward.fail(W0, 1)
        assert ward.suspended() == {"w0"}


@virtual_time
async def test_requests_that_wait_at_a_worker_suspended_for_other_failures_are_given_up_too() -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing = {source("w0")}
        waiting = ward.wait_for_a_byte(ward.decision())
        await moment()
        ward.fail(W0)
        assert await asyncio.wait_for(waiting, LATE_S) == pytest.approx(0.5, abs=0.01)


@virtual_time
async def test_requests_sent_to_a_suspended_worker_are_given_up_when_it_fails_another_probe() -> None:
    ward = Ward()
    async with ward.watched():
        ward.takes_s = {source("w0"): FOREVER_S}
        late = ward.decision()
        ward.fail(W0)
        await until(12.0)
        waiting = ward.wait_for_a_byte(late)
        assert await asyncio.wait_for(waiting, LATE_S) < 12.0 + 2 * MIN_STALL_S


@virtual_time
async def test_a_request_at_an_engine_that_is_gone_without_a_word_is_given_up() -> None:
    ward = Ward()
    async with ward.watched():
        waiting = ward.wait_for_a_byte(ward.decision())
        await until(1.0)
        ward.fleet.start(report("w0", "i2"))
        others = ward.wait_for_a_byte(ward.decision())
        await until(MIN_STALL_S - 1.0)
        ward.hear(W0)
        assert await asyncio.wait_for(waiting, LATE_S) == pytest.approx(MIN_STALL_S + LOOK_S, abs=LOOK_S)
        assert (ward.suspended(), others.done()) == (set(), False)
        others.cancel()


@virtual_time
async def test_requests_at_a_worker_that_was_forgotten_are_given_up() -> None:
    """A machine without power says nothing: no reset ends the connection, and no other life follows."""
    ward = Ward()
    async with ward.watched():
        waiting = ward.wait_for_a_byte(ward.decision())
        await until(9.9)
        ward.core.forget(W0)
        assert await asyncio.wait_for(waiting, LATE_S) == pytest.approx(MIN_STALL_S + LOOK_S, abs=LOOK_S)


@virtual_time
async def test_a_stream_of_a_lost_life_ends_once_nothing_more_comes_of_it() -> None:
    ward = Ward()
    async with ward.watched():
        ended_s: list[float] = []
        with ward.failover.attempt(ward.decision()) as attempt:
            attempt.has_begun = True
            attempt.end = lambda: ended_s.append(since_start())
            ward.core.forget(W0)
            for at_s in range(5, 60, 5):  # cut off from us, perhaps, and not from its client
                await until(at_s)
                ward.failover.heard(attempt)
            assert ended_s == []
            await until(90.0)
        assert ended_s == [pytest.approx(55.0 + MIN_STALL_S + LOOK_S, abs=LOOK_S)]


@virtual_time
async def test_a_stream_under_way_is_no_reason_to_doubt_its_worker() -> None:
    ward = Ward()
    async with ward.watched():
        with ward.failover.attempt(ward.decision()) as attempt:
            attempt.has_begun = True
            await until(LATE_S)
        assert ward.probes == []


@pytest.mark.parametrize("takes_s", [0.0, 9.0], ids=["between probes", "during one"])
@virtual_time
async def test_a_worker_that_was_forgotten_while_suspended_and_is_heard_again_comes_back(takes_s: float) -> None:
    ward = Ward()
    async with ward.watched():
        ward.failing, ward.takes_s = {source("w0")}, {source("w0"): takes_s}
        ward.fail(W0)
        await until(6.0)
        ward.core.forget(W0)
        ward.fleet.start(report("w0"))
        ward.failing = set()
        ward.fail(W0, 1)
        assert ward.suspended() == set(), "one failure isn't three"
        ward.fail(W0, 2)
        assert ward.suspended() == {"w0"}
        await until(LATE_S)
        assert ward.suspended() == set()
