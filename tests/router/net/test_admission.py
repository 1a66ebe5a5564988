"""Admission: who may be sent at once, who waits and how that ends, and that nobody leaves a trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import AdmissionConfig, Priority, Ticket
from router.booking import Booking
from router.errors import InvalidRequest, Overloaded
from router.net.admission import Admission, priority_of
from router.reports import RankLoad, WorkerReport
from tests.router.fleet import A1, B1, Fleet, holding, report, request
from tests.router.net.virtual_time import moment, run_virtual, virtual_time

HIGH, NORMAL, LOW = Priority
LOOK_S = 0.25
"""Pace at which room is looked for that nobody tells of."""


def worker(name: str, places: int) -> WorkerReport:
    plain = report(name)
    load = RankLoad(running=0, waiting=0, max_running=places)
    return msgspec.structs.replace(plain, ranks=(msgspec.structs.replace(plain.ranks[0], load=load),))


class Desk:
    """Admission to a fleet with so many places, and clients who hold one until they are told to leave."""

    def __init__(self, places: int = 1, **config: Any) -> None:
        self.fleet = Fleet()
        self.fleet.start(worker("w0", places))
        self.fleet.load(holding("w0", "a", A1), holding("w0", "b", B1))
        self.waited_s: list[float] = []
        self.admission = Admission(self.fleet.core, AdmissionConfig(**config), record_wait=self.waited_s.append)
        #: in the order in which they were sent
        self.sent: list[str] = []
        self.bookings: dict[str, Booking] = {}
        self.tasks: dict[str, asyncio.Task[Ticket | None]] = {}

    async def serve(
        self, name: str, *, adapter: str | None = None, priority: Priority = NORMAL, tokens: int = 100
    ) -> Ticket | None:
        """What the dispatcher does, up to sending."""
        ticket = await self.admission.enter(adapter, priority, tokens)
        decision = self.fleet.core.route(request(adapter=adapter, now_s=time.monotonic()))
        self.bookings[name] = self.fleet.core.book(decision, now_s=time.monotonic())
        self.admission.sent(ticket)
        self.sent.append(name)
        return ticket

    def come(self, name: str, **asks: Any) -> asyncio.Task[Ticket | None]:
        self.tasks[name] = asyncio.ensure_future(self.serve(name, **asks))
        return self.tasks[name]

    async def all_come(self, *names: str, **asks: Any) -> None:
        for name in names:
            self.come(name, **asks)
            await moment()

    def leave(self, name: str) -> None:
        """Its request ends."""
        self.bookings.pop(name).finish()
        self.admission.changed()

    async def all_leave(self) -> list[str]:
        """One after the other, until nobody has a place; the order in which all were sent."""
        while self.bookings:
            self.leave(next(iter(self.bookings)))
            await moment()
        return self.sent


async def refusal(work: Coroutine[Any, Any, object] | asyncio.Task[Any]) -> Overloaded:
    with pytest.raises(Overloaded) as error:
        await work
    assert error.value.status == 429
    assert 1 <= error.value.retry_after_s <= 60
    return error.value


# -- room and no room --------------------------------------------------------------------------------------------


@virtual_time
async def test_where_there_is_room_nobody_waits() -> None:
    desk = Desk(places=2)
    assert [await desk.serve(name, adapter=adapter) for name, adapter in (("x", None), ("y", "a"))] == [None, None]
    assert (len(desk.admission), desk.waited_s, desk.admission.refused) == (0, [], {})


@virtual_time
async def test_an_adapter_that_nobody_holds_is_not_for_waiting_here() -> None:
    desk = Desk()
    await desk.serve("x")
    assert await desk.admission.enter("unknown", NORMAL, 1) is None


@virtual_time
async def test_those_without_room_are_let_go_in_their_order_one_for_each_that_ends() -> None:
    desk = Desk(places=2)
    await desk.all_come("v", "w", "x", "y", "z")
    assert (desk.sent, len(desk.admission)) == (["v", "w"], 3)
    desk.leave("w")
    await moment()
    assert (desk.sent, len(desk.admission)) == (["v", "w", "x"], 2)
    assert await desk.all_leave() == ["v", "w", "x", "y", "z"]
    assert len(desk.admission) == 0
    assert desk.tasks["x"].result() is not None


@virtual_time
async def test_room_for_several_is_given_at_once_each_judged_after_the_last_has_booked() -> None:
    desk = Desk(places=2)
    await desk.all_come("u", "v", "w", "x", "y")
    for name in ("u", "v"):
        desk.bookings.pop(name).finish()
    desk.admission.changed()
    await moment()
    assert (desk.sent, len(desk.admission)) == (["u", "v", "w", "x"], 1)


@virtual_time
async def test_a_newcomer_takes_no_place_from_one_that_is_just_let_go() -> None:
    desk = Desk()
    await desk.all_come("x", "y")
    desk.leave("x")
    newcomer = desk.come("z")
    await moment()
    assert (desk.sent, newcomer.done(), len(desk.admission)) == (["x", "y"], False, 1)


@virtual_time
async def test_a_newcomer_does_not_overtake_those_that_wait() -> None:
    desk = Desk()
    await desk.all_come("x", "y")
    desk.bookings.pop("x").finish()
    await desk.all_come("z")
    assert (desk.sent, len(desk.admission)) == (["x", "y"], 1)


@virtual_time
async def test_one_whose_adapter_has_room_passes_those_whose_adapters_have_none() -> None:
    desk = Desk()
    desk.fleet.start(worker("w1", 1))
    desk.fleet.load(holding("w0", "a", A1), holding("w1", "b", B1))
    await desk.all_come("a0", "a1", adapter="a")
    assert await desk.come("b0", adapter="b") is not None
    assert (desk.sent, len(desk.admission)) == (["a0", "b0"], 1)


@virtual_time
async def test_priorities_go_first_and_adapters_take_turns() -> None:
    desk = Desk()
    await desk.all_come("x")
    await desk.all_come("low", priority=LOW)
    await desk.all_come("a0", "a1", "a2", adapter="a")
    await desk.all_come("b0", adapter="b")
    await desk.all_come("high", priority=HIGH)
    assert await desk.all_leave() == ["x", "high", "a0", "b0", "a1", "a2", "low"]


@virtual_time
async def test_room_that_nobody_tells_of_is_found_soon() -> None:
    desk = Desk()
    looking = asyncio.ensure_future(desk.admission.run())
    await desk.all_come("x", "y", "z")
    desk.fleet.start(worker("w1", 1))
    since_s = time.monotonic()
    await desk.tasks["y"]
    assert time.monotonic() - since_s <= LOOK_S
    assert (desk.sent, len(desk.admission)) == (["x", "y"], 1)
    looking.cancel()


@virtual_time
async def test_waits_are_recorded_however_they_end() -> None:
    desk = Desk()
    await desk.all_come("x", "y", "z")
    await asyncio.sleep(3.0)
    desk.leave("x")
    await asyncio.sleep(4.0)
    desk.tasks["z"].cancel()
    await moment()
    assert desk.waited_s == pytest.approx([3.0, 7.0], abs=0.01)


# -- those who leave ---------------------------------------------------------------------------------------------


@virtual_time
async def test_one_that_gives_up_is_out_of_the_line() -> None:
    desk = Desk()
    await desk.all_come("w", "x", "y", "z")
    desk.tasks["x"].cancel()
    await moment()
    assert (desk.tasks["x"].cancelled(), len(desk.admission)) == (True, 2)
    assert await desk.all_leave() == ["w", "y", "z"]
    assert (len(desk.admission), desk.admission.refused) == (0, {})


@virtual_time
async def test_one_that_gives_up_as_it_is_let_go_leaves_its_place_to_the_next() -> None:
    desk = Desk()
    await desk.all_come("w", "x", "y")
    desk.leave("w")
    desk.tasks["x"].cancel()
    await moment()
    assert (desk.tasks["x"].cancelled(), desk.sent, len(desk.admission)) == (True, ["w", "y"], 0)
    assert await desk.all_leave() == ["w", "y"]
    assert await desk.serve("z") is None


@virtual_time
async def test_the_last_in_line_that_gives_up_as_it_is_let_go_leaves_nothing() -> None:
    desk = Desk()
    await desk.all_come("w", "x")
    desk.leave("w")
    desk.tasks["x"].cancel()
    await moment()
    assert await desk.serve("z") is None


# -- those who are sent away -------------------------------------------------------------------------------------


@virtual_time
async def test_who_waits_too_long_is_sent_away_and_younger_ones_stay() -> None:
    desk = Desk(queue_timeout_s=5.0)
    looking = asyncio.ensure_future(desk.admission.run())
    await desk.all_come("x", "old")
    since_s = time.monotonic()
    await asyncio.sleep(2.0)
    await desk.all_come("young")
    error = await refusal(desk.tasks["old"])
    assert 5.0 - 0.01 <= time.monotonic() - since_s <= 5.0 + LOOK_S
    assert (error.code, str(error)) == (
        "queue_timeout",
        "no worker had room within 5 s (router.admission.queue_timeout_s)",
    )
    assert (len(desk.admission), desk.admission.refused) == (1, {"queue_timeout": 1})
    assert await desk.all_leave() == ["x", "young"]
    looking.cancel()


@virtual_time
async def test_beyond_the_bound_newcomers_are_refused() -> None:
    desk = Desk(max_queued=2)
    await desk.all_come("x", "y", "z")
    error = await refusal(desk.serve("more"))
    assert (error.code, str(error)) == ("queue_full", "2 requests wait already (router.admission.max_queued)")
    assert (len(desk.admission), desk.admission.refused) == (2, {"queue_full": 1})
    assert await desk.all_leave() == ["x", "y", "z"]
    assert desk.waited_s == pytest.approx([0.0, 0.0], abs=0.1), "who was refused hasn't waited"


@virtual_time
@pytest.mark.parametrize(
    ("max_queued", "queued", "elsewhere", "refused"),
    [(3, 0, 2, False), (3, 0, 3, True), (3, 2, 1, True), (3, 3, 0, False), (0, 0, 0, False), (0, 0, 1, True)],
)
async def test_who_waits_for_an_adapter_counts_too_but_one_always_may(
    max_queued: int, queued: int, elsewhere: int, refused: bool
) -> None:
    desk = Desk(max_queued=max_queued)
    await desk.all_come("runs", *(f"waits{n}" for n in range(queued)))
    told = pytest.raises(Overloaded, match=f"^{elsewhere} requests wait for adapters") if refused else nullcontext()
    with told as caught:
        desk.admission.check_bound(elsewhere)
    if caught is not None:
        assert (caught.value.code, caught.value.retry_after_s >= 1) == ("queue_full", True)
    assert desk.admission.refused.total() == refused
    await desk.all_leave()


@virtual_time
async def test_the_longest_line_makes_way_for_another_adapter_and_is_told() -> None:
    desk = Desk(max_queued=3)
    await desk.all_come("x")
    await desk.all_come("a0", "a1", "a2", adapter="a")
    await desk.all_come("b0", adapter="b")
    error = await refusal(desk.tasks["a2"])
    assert (error.code, str(error)) == ("queue_full", "3 requests wait already, most of them of a")
    assert (len(desk.admission), desk.admission.refused) == (3, {"queue_full": 1})
    assert await desk.all_leave() == ["x", "a0", "b0", "a1"]


@virtual_time
async def test_a_flood_of_the_base_model_is_called_so() -> None:
    desk = Desk(max_queued=2)
    await desk.all_come("x", "y", "z")
    await desk.all_come("b0", adapter="b")
    assert str(await refusal(desk.tasks["z"])) == "2 requests wait already, most of them of the base model"


@virtual_time
async def test_a_lower_priority_makes_way_and_a_higher_one_never() -> None:
    desk = Desk(max_queued=1)
    await desk.all_come("x")
    await desk.all_come("low", priority=LOW)
    await desk.all_come("high", priority=HIGH)
    assert (await refusal(desk.tasks["low"])).code == "queue_full"
    assert (await refusal(desk.serve("more", priority=NORMAL))).code == "queue_full"
    assert await desk.all_leave() == ["x", "high"]


# -- any order of it ---------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "come", "leave", "cancel", "wait"]),
        st.integers(0, 30),
        st.sampled_from(Priority),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(STEPS, st.integers(1, 3), st.integers(1, 5))
def test_whatever_happens_each_is_served_or_told_and_places_are_neither_lost_nor_doubled(
    steps: list[tuple[str, int, Priority]], places: int, max_queued: int
) -> None:
    async def scenario() -> None:
        desk = Desk(places=places, max_queued=max_queued, queue_timeout_s=10.0)
        looking = asyncio.ensure_future(desk.admission.run())
        for i, (what, which, priority) in enumerate(steps):
            if what == "come":
                desk.come(f"{i}", adapter=(None, "a", "b")[which % 3], priority=priority)
            elif what == "leave" and desk.bookings:
                desk.leave(sorted(desk.bookings)[which % len(desk.bookings)])
            elif what == "cancel" and desk.tasks:
                list(desk.tasks.values())[which % len(desk.tasks)].cancel()
            elif what == "wait":
                await asyncio.sleep(which / 4)
            await moment()
            waiting = sum(not task.done() for task in desk.tasks.values())
            assert len(desk.bookings) <= places
            assert waiting == len(desk.admission) <= max_queued
            assert not waiting or len(desk.bookings) == places
        await desk.all_leave()
        ends = await asyncio.gather(*desk.tasks.values(), return_exceptions=True)
        assert all(end is None or isinstance(end, Ticket | Overloaded | asyncio.CancelledError) for end in ends)
        assert sum(isinstance(end, Overloaded) for end in ends) == desk.admission.refused.total()
        assert len(desk.admission) == 0
        assert await desk.serve("last") is None
        assert not looking.done()
        looking.cancel()

    run_virtual(scenario())


# -- the header --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "priority"),
    [(None, NORMAL), ("high", HIGH), ("normal", NORMAL), ("low", LOW), ("HIGH", HIGH), ("  Low ", LOW)],
)
def test_priority_is_what_the_header_says(header: str | None, priority: Priority) -> None:
    assert priority_of(header) is priority


@pytest.mark.parametrize("header", ["", "0", "urgent", "high,low"])
def test_another_priority_is_refused_with_what_there_is(header: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        priority_of(header)
    assert str(error.value) == f"x-loray-priority must be one of high, normal, low, got {header!r}"
