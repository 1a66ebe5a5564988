"""Traces: what came when, and what prompts have in common. Readers for three formats, by the file's content.

| format | told by | what it is |
|---|---|---|
| Mooncake | `hash_ids` and `timestamp` (ms) a line | 512-token blocks; an id stands for all up to it |
| agentic sessions | `requests` and `block_size` a line, gzip | sessions with 64-token blocks of their own |
| simple | `at_s` a line | `{"at_s", "pages": [ids], "input_tokens", "output_tokens", "session"?, "adapter"?}` |

In the simple format a page id stands for all of the prompt up to it, and `page_size` may be given on any line, the
same on all that do (default 512). Ids beyond a prompt's full pages are left out.
Sources: https://github.com/kvcache-ai/Mooncake (FAST'25 traces), kv-cache-tester.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

MOONCAKE_BLOCK: Final = 512
_AGENTIC_PAGES: Final = 16
"""Blocks of an agentic trace that make a page here."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a trace."""

    at_s: float
    pages: tuple[int, ...]
    """Ids of its full pages; one stands for all of the prompt up to it."""
    num_tokens: int
    num_output: int
    session: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in order of time."""

    calls: list[Call]
    page_size: int

    @property
    def span_s(self) -> float:
        """From the first call to the last."""
        return self.calls[-1].at_s - self.calls[0].at_s


class TraceError(ValueError):
    """The file isn't a trace that we can read; the message says which line and why."""


def read_trace(path: Path, *, scale: float = 1.0, span_s: float | None = None, seed: int = 0) -> Trace:
    """Read a trace of any of the formats.

    `scale` multiplies all lengths of agentic sessions (a real one's prompts have 100,000 tokens); their starts are
    drawn over `span_s` seconds (an hour unless told), for the trace doesn't tell them. Raises TraceError.
    """
    if not 0 < scale <= 1:
        raise TraceError(f"scale must be above 0 and at most 1, got {scale}")
    lines = _lines(path)
    try:
        number, first = next(lines)
    except StopIteration:
        raise TraceError(f"{path} is empty") from None
    keys = _decode(path, number, first, dict[str, Any])
    lines = chain([(number, first)], lines)
    if "requests" in keys:
        rows = _Rows(path, lines, _AgenticRow)
        trace = _agentic(rows, scale=scale, span_s=span_s or 3600.0, rng=random.Random(seed))
    elif "timestamp" in keys:
        trace = _mooncake(_Rows(path, lines, _MooncakeRow))
    elif "at_s" in keys:
        trace = _simple(_Rows(path, lines, _SimpleRow))
    else:
        raise TraceError(f"{path}:{number}: neither a Mooncake, an agentic nor a simple trace; keys {list(keys)}")
    if not trace.calls:
        raise TraceError(f"{path} holds no requests")
    return trace


# -- lines -------------------------------------------------------------------------------------------------------

_PageId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
"""A token's range: a page is made of its id."""
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: _Positive
    output_length: _Count
    hash_ids: list[_PageId]


class _SimpleRow(msgspec.Struct):
    at_s: float
    pages: list[_PageId]
    input_tokens: _Positive
    output_tokens: _Count
    session: str | int | None = None
    adapter: str | None = None
    page_size: _Positive | None = None


class _Request(msgspec.Struct):
    """A request, or a subagent with requests of its own."""

    t: float
    num_in: _Positive | None = msgspec.field(name="in", default=None)
    num_out: _Count | None = msgspec.field(name="out", default=None)
    h: tuple[_Count, list[tuple[_Count, _Count]]] | None = None
    requests: list[_Request] | None = None


class _AgenticRow(msgspec.Struct):
    block_size: _Positive
    requests: list[_Request]


_Row = TypeVar("_Row")


class _Rows(Generic[_Row]):
    """Rows of a file. `error` is about the latest."""

    def __init__(self, path: Path, lines: Iterable[tuple[int, bytes]], kind: type[_Row]) -> None:
        self._path = path
        self._lines = lines
        self._kind = kind
        self._number = 0

    def __iter__(self) -> Iterator[_Row]:
        for number, line in self._lines:
            self._number = number
            yield _decode(self._path, number, line, self._kind)

    def error(self, reason: str) -> TraceError:
        return TraceError(f"{self._path}:{self._number}: {reason}")


def _decode(path: Path, number: int, line: bytes, kind: type[_Row]) -> _Row:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError as exc:
        raise TraceError(f"{path}:{number}: {exc}") from exc
    except msgspec.MsgspecError as exc:
        raise TraceError(f"{path}:{number}: not JSON lines: {exc}") from exc


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as exc:  # a packed file that was cut or damaged raises any of them
        raise TraceError(f"cannot read {path}: {getattr(exc, 'strerror', None) or exc}") from exc


# -- formats -----------------------------------------------------------------------------------------------------


def _mooncake(rows: _Rows[_MooncakeRow]) -> Trace:
    sessions = _Sessions()
    calls = []
    for row in rows:
        pages = tuple(row.hash_ids[: row.input_length // MOONCAKE_BLOCK])
        calls.append(Call(row.timestamp / 1000, pages, row.input_length, max(1, row.output_length), sessions.of(pages)))
    return Trace(sorted(calls, key=lambda call: call.at_s), MOONCAKE_BLOCK)


class _Sessions:
    """Conversations of a trace that doesn't name them: whose prompt begins with nearly all of an earlier one's."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._count = 0

    def of(self, pages: tuple[int, ...]) -> int:
        session = next((self._ends[page] for page in reversed(pages[1:]) if page in self._ends), None)
        if session is None:
            session = self._count
            self._count += 1
        if len(pages) > 1:
            self._ends[pages[-1]] = session
        return session


def _agentic(rows: _Rows[_AgenticRow], *, scale: float, span_s: float, rng: random.Random) -> Trace:
    block: int | None = None
    page_size = 1
    calls: list[Call] = []
    ids: dict[tuple[int, tuple[int, ...]], int] = {}
    for session, row in enumerate(rows):
        if block not in (None, row.block_size):
            raise rows.error(f"block_size is {row.block_size} here and {block} before")
        block = row.block_size
        page_size = max(1, round(block * _AGENTIC_PAGES * scale))
        start_s = rng.uniform(0, span_s)
        root = -1 - session
        for at_s, num_in, num_out, blocks in _requests(row.requests, rows):
            if start_s + at_s > span_s:
                continue
            num_tokens = max(1, round(num_in * scale))
            pages: list[int] = []
            for i in range(min(num_tokens // page_size, len(blocks) // _AGENTIC_PAGES)):
                group = tuple(blocks[_AGENTIC_PAGES * i : _AGENTIC_PAGES * (i + 1)])
                pages.append(ids.setdefault((pages[-1] if pages else root, group), len(ids)))
            calls.append(Call(start_s + at_s, tuple(pages), num_tokens, max(1, round(num_out * scale)), session))
    return Trace(sorted(calls, key=lambda call: call.at_s), page_size)


def _requests(requests: list[_Request], rows: _Rows[_AgenticRow]) -> Iterator[tuple[float, int, int, list[int]]]:
    """Requests of a session and of its subagents: time, tokens in and out, blocks restored from their changes."""
    before: list[int] = []
    for row in requests:
        if row.requests is not None:
            for at_s, num_in, num_out, blocks in _requests(row.requests, rows):
                yield row.t + at_s, num_in, num_out, blocks
            continue
        if row.h is None or row.num_in is None or row.num_out is None:
            raise rows.error(f"the request at {row.t} lacks h, in or out")
        kept, runs = row.h
        if kept > len(before):
            raise rows.error(f"the request at {row.t} keeps {kept} blocks of {len(before)}")
        before = before[:kept]
        for start, length in runs:
            before.extend(range(start, start + length))
        yield row.t, row.num_in, row.num_out, list(before)


def _simple(rows: _Rows[_SimpleRow]) -> Trace:
    told: int | None = None
    read: list[_SimpleRow] = []
    for row in rows:
        if row.page_size is not None and told not in (None, row.page_size):
            raise rows.error(f"page_size is {row.page_size} here and {told} before")
        told = row.page_size or told
        read.append(row)
    page_size = told or MOONCAKE_BLOCK
    calls = []
    sessions: dict[str | int, int] = {}
    own = _Sessions()
    for row in read:
        pages = tuple(row.pages[: row.input_tokens // page_size])
        session = own.of(pages) if row.session is None else sessions.setdefault(row.session, len(sessions))
        calls.append(Call(row.at_s, pages, row.input_tokens, max(1, row.output_tokens), session, row.adapter))
    return Trace(sorted(calls, key=lambda call: call.at_s), page_size)
