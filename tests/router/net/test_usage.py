"""Claims of router/net/usage.py: bytes pass unchanged but for the one event that the client must not see."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.net.usage import StreamFilter, Usage, usage_of

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}}


def _event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


WORDS = _event(choices=[{"index": 0, "text": "a"}], usage=None) + _event(choices=[{"index": 0, "text": "\n\nb"}])
LAST = _event(choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
STREAM = WORDS + LAST + DONE


def _pass(stream: bytes, cuts: list[int], *, hide: bool) -> tuple[bytes, Usage | None]:
    events = StreamFilter(hide_usage=hide)
    edges = [0, *sorted({cut % len(stream) for cut in cuts}), len(stream)]
    out = b"".join(events.feed(stream[a:b]) for a, b in itertools.pairwise(edges))
    return out + events.flush(), events.usage


@settings(deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 10_000)))
def test_any_cutting_of_the_stream_gives_the_same(cuts: list[int]) -> None:
    assert _pass(STREAM, cuts, hide=False) == (STREAM, Usage(40, 3, 32))
    assert _pass(STREAM, cuts, hide=True) == (WORDS + DONE, Usage(40, 3, 32))


def test_usage_beside_choices_is_read_and_kept() -> None:
    stream = _event(choices=[{"index": 0, "text": "a"}], usage=USAGE)

    assert _pass(stream, [], hide=True) == (stream, Usage(40, 3, 32))


def test_an_unfinished_event_goes_out_at_the_end() -> None:
    assert _pass(WORDS + b"data: {", [7], hide=True) == (WORDS + b"data: {", None)


@pytest.mark.parametrize("answer", [b"", b"not json", b"[]", b'{"usage": null}', b'{"usage": 3}'])
def test_no_usage_is_none(answer: bytes) -> None:
    assert usage_of(answer) is None


def test_missing_details_are_no_cached_tokens() -> None:
    assert usage_of(b'{"usage": {"prompt_tokens": 5, "prompt_tokens_details": null}}') == Usage(5, 0, 0)
