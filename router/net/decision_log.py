"""The decision log as a file: JSON lines, the first naming the seed, for those who ask why, and for replay."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from router.choice import LoggedDecision
from router.core import RouterCore

log = logging.getLogger(__name__)

_PACE_S: Final = 0.2
_encode: Final = msgspec.json.Encoder().encode


class LogHead(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a log: one router's life."""

    router: str
    seed: int


async def keep_log(core: RouterCore, path: str, *, router_id: str) -> None:
    """Write decisions to a new file at `path` until cancelled; gives up, and says so, where it can't be written."""
    next_number = 0
    try:
        with _new_file(path) as file:
            file.write(_encode(LogHead(router=router_id, seed=core.seed)) + b"\n")
            try:
                while True:
                    await asyncio.sleep(_PACE_S)
                    next_number = _write(core, file, next_number)
            finally:
                _write(core, file, next_number)  # the last moment's, too
    except OSError as exc:
        log.error("no decision log at %s: %s", path, exc)


def _write(core: RouterCore, file: BinaryIO, next_number: int) -> int:
    """Decisions from `next_number` on. Returns the number of the next."""
    for entry in core.decisions(since=next_number):
        if entry.number > next_number:
            log.warning("decisions %d to %d aren't in the log", next_number, entry.number - 1)
        file.write(_encode(entry) + b"\n")
        next_number = entry.number + 1
    file.flush()
    return next_number


def _new_file(path: str) -> BinaryIO:
    return Path(path).expanduser().open("wb")


def read_log(path: Path) -> tuple[LogHead, list[LoggedDecision]]:
    """A log as `keep_log` wrote it; a last line that was cut is left out. Raises ValueError."""
    head, *lines = path.read_bytes().split(b"\n")
    decode = msgspec.json.Decoder(LoggedDecision).decode
    try:
        return msgspec.json.decode(head, type=LogHead), [decode(line) for line in lines[:-1]]
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{path} is not a decision log: {exc}") from exc
