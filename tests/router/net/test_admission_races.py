"""Admission where a client leaves in the very moment that something else happens to its request."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import Priority, Ticket
from router.errors import Overloaded
from tests.router.net.test_admission import LOOK_S, Desk, refusal
from tests.router.net.virtual_time import START_S, moment, run_virtual, virtual_time


@virtual_time
async def test_room_that_comes_as_one_leaves_goes_to_the_next() -> None:
    desk = Desk()
    await desk.all_come("w", "x", "y")
    desk.tasks["x"].cancel()
    desk.leave("w")
    await moment()
    assert (desk.tasks["x"].cancelled(), desk.sent, len(desk.admission)) == (True, ["w", "y"], 0)


@virtual_time
async def test_one_that_leaves_as_it_is_displaced_harms_nobody() -> None:
    desk = Desk(max_queued=2)
    await desk.all_come("w", "x", "y")
    desk.come("b0", adapter="b")
    desk.tasks["y"].cancel()
    await moment()
    assert (desk.tasks["y"].cancelled(), desk.admission.refused) == (True, {})
    assert await desk.all_leave() == ["w", "x", "b0"]


@virtual_time
async def test_one_that_leaves_as_its_time_is_up_does_not_end_the_watch() -> None:
    desk = Desk(queue_timeout_s=5.0)
    watch = asyncio.ensure_future(desk.admission.run())
    await desk.all_come("w", "x")
    await asyncio.sleep(5.1)
    loop = asyncio.get_running_loop()
    loop.call_at(START_S + 5.0 + LOOK_S, desk.tasks["x"].cancel)
    await asyncio.sleep(1.0)
    assert (desk.tasks["x"].cancelled(), watch.done()) == (True, False)
    watch.cancel()


@virtual_time
async def test_with_no_line_at_all_those_without_room_are_refused() -> None:
    desk = Desk(max_queued=0)
    await desk.all_come("w")
    assert (await refusal(desk.serve("x"))).code == "queue_full"
    desk.leave("w")
    assert await desk.serve("y") is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "leave", "cancel", "moment", "turn", "wait"]), st.integers(0, 30)),
    max_size=60,
)


@settings(deadline=None, max_examples=80, derandomize=True, database=None)
@given(STEPS, st.integers(1, 3), st.integers(0, 5))
def test_in_any_order_and_at_once_each_is_served_or_told(
    steps: list[tuple[str, int]], places: int, max_queued: int
) -> None:
    async def scenario() -> None:
        desk = Desk(places=places, max_queued=max_queued, queue_timeout_s=3.0)
        watch = asyncio.ensure_future(desk.admission.run())
        for i, (what, which) in enumerate(steps):
            if what == "come":
                desk.come(f"{i}", adapter=(None, "a", "b")[which % 3], priority=Priority(which % 2))
            elif what == "leave" and desk.bookings:
                desk.leave(sorted(desk.bookings)[which % len(desk.bookings)])
            elif what == "cancel" and desk.tasks:
                list(desk.tasks.values())[which % len(desk.tasks)].cancel()
            elif what == "moment":
                await moment()
            elif what == "turn":
                await asyncio.sleep(0)
            elif what == "wait":
                await asyncio.sleep(which / 4)
            assert len(desk.bookings) <= places
        await moment()
        await desk.all_leave()
        ends = await asyncio.gather(*desk.tasks.values(), return_exceptions=True)
        assert all(end is None or isinstance(end, Ticket | Overloaded | asyncio.CancelledError) for end in ends)
        assert (len(desk.admission), watch.done()) == (0, False)
        assert await desk.serve("last") is None
        watch.cancel()

    run_virtual(scenario())


@pytest.mark.parametrize("leaves_first", [True, False])
@virtual_time
async def test_a_place_is_given_once_whichever_comes_first(leaves_first: bool) -> None:
    desk = Desk()
    await desk.all_come("w", "x", "y", "z")
    if leaves_first:
        desk.tasks["x"].cancel()
    desk.leave("w")
    desk.tasks["x"].cancel()
    desk.tasks["y"].cancel()
    await moment()
    assert (desk.sent, len(desk.admission)) == (["w", "z"], 0)
