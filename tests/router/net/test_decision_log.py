"""Claims of router/net/decision_log.py: every decision once and in order, gaps are said, and damage is a ValueError."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.choice import replay
from router.core import MAX_KEPT, RouterCore
from router.net.decision_log import LogHead, keep_log, read_log
from tests.router.decision_history import History
from tests.router.fleet import Fleet, report, request
from tests.router.net.virtual_time import moment, run_virtual, virtual_time

PACE_S = 0.2


@asynccontextmanager
async def kept(core: RouterCore, path: Path) -> AsyncIterator[asyncio.Task[None]]:
    keeping = asyncio.ensure_future(keep_log(core, str(path), router_id="r0"))
    await moment()
    try:
        yield keeping
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def decide(core: RouterCore, times: int = 1) -> None:
    for _ in range(times):
        core.route(request())


def numbers(path: Path) -> list[int]:
    return [entry.number for entry in read_log(path)[1]]


@pytest.fixture
def core() -> RouterCore:
    fleet = Fleet()
    fleet.start(report("w0"), report("w1"))
    return fleet.core


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A log of some decisions."""

    async def write() -> None:
        history = History(2)
        async with kept(history.core, tmp_path / "whole"):
            history.go_on(16)
            await asyncio.sleep(2 * PACE_S)

    run_virtual(write())
    return tmp_path / "whole"


# -- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@virtual_time
async def test_a_log_read_back_is_what_was_decided_and_would_be_decided_again(seed: int, tmp_path: Path) -> None:
    history = History(seed)
    async with kept(history.core, tmp_path / "log"):
        for num_steps in (1, 40, 3, 120):
            history.go_on(num_steps)
            await asyncio.sleep(PACE_S)
            head, log = read_log(tmp_path / "log")
            assert log == history.core.decisions()
    assert len(log) > 50
    assert head == LogHead(router="r0", seed=history.core.seed)
    assert replay(log, seed=head.seed) == []


@virtual_time
async def test_it_is_written_soon_after_and_once(core: RouterCore, tmp_path: Path) -> None:
    decide(core, 2)
    async with kept(core, tmp_path / "log"):
        for n in range(2, 30):
            await asyncio.sleep(PACE_S)
            assert numbers(tmp_path / "log") == list(range(n))
            decide(core)
        await asyncio.sleep(PACE_S)
        await asyncio.sleep(PACE_S)
        assert numbers(tmp_path / "log") == list(range(30))


@virtual_time
async def test_what_was_decided_just_before_the_end_is_written_too(core: RouterCore, tmp_path: Path) -> None:
    async with kept(core, tmp_path / "log"):
        decide(core, 2)
        await asyncio.sleep(PACE_S)
        decide(core, 3)
    assert numbers(tmp_path / "log") == list(range(5))


@virtual_time
async def test_more_decisions_than_are_kept_leave_a_gap_that_is_said(
    core: RouterCore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(core, tmp_path / "log"):
        decide(core, 3)
        await asyncio.sleep(PACE_S)
        decide(core, MAX_KEPT)
        await asyncio.sleep(PACE_S)
        assert (numbers(tmp_path / "log"), caplog.messages) == (list(range(MAX_KEPT + 3)), [])
        decide(core, MAX_KEPT + 5)
        await asyncio.sleep(PACE_S)
    assert caplog.messages == [f"decisions {MAX_KEPT + 3} to {MAX_KEPT + 7} aren't in the log"]
    assert numbers(tmp_path / "log") == [*range(MAX_KEPT + 3), *range(MAX_KEPT + 8, 2 * MAX_KEPT + 8)]


@virtual_time
async def test_a_router_begins_its_log_anew(core: RouterCore, whole: Path) -> None:
    async with kept(core, whole):
        decide(core)
        await asyncio.sleep(PACE_S)
    head, log = read_log(whole)
    assert (head.seed, len(log)) == (core.seed, 1)


@pytest.mark.parametrize("path", ["/dev/full", "/nowhere/at/all", "/"])
@virtual_time
async def test_where_it_cannot_be_written_it_says_so_and_ends(
    core: RouterCore, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    decide(core)
    await keep_log(core, path, router_id="r0")
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert said.getMessage().startswith(f"no decision log at {path}: ")


@virtual_time
async def test_home_is_meant_by_a_tilde(core: RouterCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with kept(core, Path("~/log")):
        await asyncio.sleep(PACE_S)
        assert read_log(tmp_path / "log") == (LogHead(router="r0", seed=core.seed), [])


# -- reading -----------------------------------------------------------------------------------------------------


def test_a_log_cut_anywhere_is_what_is_whole_of_it(whole: Path) -> None:
    data = whole.read_bytes()
    head, log = read_log(whole)
    assert len(log) > 3
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    for cut in sorted({*range(0, len(data), 29), *(end + more for end in ends for more in (-1, 0, 1, 2))}):
        whole.write_bytes(data[:cut])
        num_lines = data[:cut].count(b"\n")
        if cut < ends[0]:
            with pytest.raises(ValueError, match="is not a decision log"):
                read_log(whole)
        else:
            assert read_log(whole) == (head, log[: max(0, num_lines - 1)])


def test_damage_is_a_value_error_or_another_log(whole: Path) -> None:
    data = whole.read_bytes()
    num_refused = 0
    places = range(0, len(data), 67)
    for at in places:
        for byte in (0x00, 0x0A, 0x7D, 0xFF):
            whole.write_bytes(data[:at] + bytes([byte]) + data[at + 1 :])
            try:
                read_log(whole)
            except ValueError:
                num_refused += 1
    assert len(places) < num_refused < 4 * len(places)


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b'{"router":"r"}\n', b"[1]\n", b"\xff\n", b'{"seed":1}\n{}\n'])
def test_another_file_is_refused_by_its_name(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{path} is not a decision log: "):
        read_log(path)
