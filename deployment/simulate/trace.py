"""Traces: what came when, and what prompts have in common. Readers for three formats, by the file's content.

| format | told by | what it is |
|---|---|---|
| Mooncake | `hash_ids` and `timestamp` (ms) a line | 512-token blocks; an id stands for all up to it |
| agentic sessions | `requests` and `block_size` a line, gzip | sessions with 64-token blocks of their own |
| simple | `at_s` a line | `{"at_s", "pages": [ids], "input_tokens", "output_tokens", "session"?, "adapter"?}` |

In the simple format a page id stands for all of the prompt up to it, and `page_size` may be given on any line
(default 512). Sources: https://github.com/kvcache-ai/Mooncake (FAST'25 traces), kv-cache-tester.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

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
    try:
        if "requests" in first:
            trace = _agentic(first, lines, scale=scale, span_s=span_s or 3600.0, rng=random.Random(seed))
        elif "timestamp" in first:
            trace = _mooncake(first, lines)
        elif "at_s" in first:
            trace = _simple(first, lines)
        else:
            raise TraceError(f"{path}:{number}: neither a Mooncake, an agentic nor a simple trace; keys {list(first)}")
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        if isinstance(exc, TraceError):
            raise
        raise TraceError(f"{path}: a line lacks or misuses a field: {type(exc).__name__}: {exc}") from exc
    if not trace.calls:
        raise TraceError(f"{path} holds no requests")
    return trace


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, msgspec.json.decode(line, type=dict[str, Any])
    except OSError as exc:
        raise TraceError(f"cannot read {path}: {exc.strerror or exc}") from exc
    except msgspec.MsgspecError as exc:
        raise TraceError(f"{path}: not JSON lines: {exc}") from exc


def _mooncake(first: dict[str, Any], rest: Iterable[tuple[int, dict[str, Any]]]) -> Trace:
    sessions = _Sessions()
    calls = []
    for row in (first, *(row for _, row in rest)):
        pages = tuple(row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK])
        calls.append(
            Call(row["timestamp"] / 1000, pages, row["input_length"], max(1, row["output_length"]), sessions.of(pages))
        )
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


def _agentic(
    first: dict[str, Any],
    rest: Iterable[tuple[int, dict[str, Any]]],
    *,
    scale: float,
    span_s: float,
    rng: random.Random,
) -> Trace:
    block = first["block_size"]
    page_size = max(1, round(block * _AGENTIC_PAGES * scale))
    calls: list[Call] = []
    ids: dict[tuple[int, tuple[int, ...]], int] = {}
    roots = count(1)
    for session, row in enumerate((first, *(row for _, row in rest))):
        start_s = rng.uniform(0, span_s)
        root = -next(roots)
        for at_s, num_in, num_out, blocks in _requests(row["requests"]):
            if start_s + at_s > span_s:
                continue
            num_tokens = max(1, round(num_in * scale))
            pages: list[int] = []
            for i in range(min(num_tokens // page_size, len(blocks) // _AGENTIC_PAGES)):
                group = tuple(blocks[_AGENTIC_PAGES * i : _AGENTIC_PAGES * (i + 1)])
                pages.append(ids.setdefault((pages[-1] if pages else root, group), len(ids)))
            calls.append(Call(start_s + at_s, tuple(pages), num_tokens, max(1, round(num_out * scale)), session))
    return Trace(sorted(calls, key=lambda call: call.at_s), page_size)


def _requests(rows: list[dict[str, Any]]) -> Iterator[tuple[float, int, int, list[int]]]:
    """Requests of a session and of its subagents: time, tokens in and out, blocks restored from their changes."""
    before: list[int] = []
    for row in rows:
        if "requests" in row:
            yield from ((row.get("t", 0.0) + at, *tail) for at, *tail in _requests(row["requests"]))
        if "h" not in row:
            continue
        kept, runs = row["h"]
        before = before[:kept]
        for start, length in runs:
            before.extend(range(start, start + length))
        yield row["t"], row["in"], row["out"], list(before)


def _simple(first: dict[str, Any], rest: Iterable[tuple[int, dict[str, Any]]]) -> Trace:
    page_size = 512
    calls = []
    sessions: dict[Any, int] = {}
    own = _Sessions()
    for row in (first, *(row for _, row in rest)):
        page_size = int(row.get("page_size", page_size))
        pages = tuple(row["pages"])
        session = own.of(pages) if "session" not in row else sessions.setdefault(row["session"], len(sessions))
        calls.append(
            Call(row["at_s"], pages, row["input_tokens"], max(1, row["output_tokens"]), session, row.get("adapter"))
        )
    return Trace(sorted(calls, key=lambda call: call.at_s), page_size)
