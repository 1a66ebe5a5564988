"""Claims of deployment/simulate/trace.py; restored sessions are held against a naive decoder."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from deployment.simulate.trace import Call, Trace, TraceError, read_trace
from tests.deployment.simulate.traces import write_lines

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
AGENTIC = {"block_size": 64, "requests": [{"t": 0.0, "in": 2100, "out": 5, "h": [0, [[1, 32]]]}]}
SIMPLE = {"at_s": 0.0, "pages": [1, 2], "input_tokens": 1100, "output_tokens": 3}
GROUP = 16
"""Blocks a page of an agentic trace."""


# -- Mooncake and simple traces ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_lines_become_calls_in_order_of_time(tmp_path: Path, name: str) -> None:
    rows = [
        {"timestamp": 2500, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 9]},
        {"timestamp": 1000, "input_length": 511, "output_length": 2, "hash_ids": [4]},
    ]

    trace = read_trace(write_lines(tmp_path / name, rows))

    assert trace == Trace(
        [
            Call(0.0, (0, 9), 1024, 7, 1),
            Call(1.0, (), 511, 2, 2),  # its only block isn't full
            Call(2.5, (0, 1, 2), 1600, 1, 0),  # so is its last; and an output has a token at least
        ],
        512,
    )
    assert trace.span_s == 2.5


def test_simple_lines_carry_what_they_say(tmp_path: Path) -> None:
    rows = [
        {"at_s": 3, "pages": [1, 2], "input_tokens": 40, "output_tokens": 0, "session": "b", "page_size": 16},
        {"at_s": 1.5, "pages": [], "input_tokens": 4, "output_tokens": 9, "session": "a", "adapter": "x"},
        {"at_s": 9, "pages": [1, 2, 3], "input_tokens": 50, "output_tokens": 1, "session": "b", "adapter": None},
    ]

    assert read_trace(write_lines(tmp_path / "t.jsonl", rows)) == Trace(
        [Call(1.5, (), 4, 9, 1, "x"), Call(3, (1, 2), 40, 1, 0), Call(9, (1, 2, 3), 50, 1, 0)], 16
    )


def test_simple_lines_without_sizes_and_sessions_get_them(tmp_path: Path) -> None:
    rows = [{**SIMPLE, "pages": pages} for pages in ([1, 2], [1, 7], [1, 2, 3])]

    trace = read_trace(write_lines(tmp_path / "t.jsonl", rows))

    assert trace.page_size == 512
    assert [call.session for call in trace.calls] == [0, 1, 0]


def test_empty_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{json.dumps(SIMPLE)}\n\n  \n{json.dumps(SIMPLE)}")

    assert len(read_trace(path).calls) == 2


# -- conversations of traces that don't name them ----------------------------------------------------------------


def test_whose_prompt_begins_with_an_earlier_one_continues_it(tmp_path: Path) -> None:
    prompts = {
        (0, 1, 2): 0,
        (0, 10, 11): 1,  # shares the system prompt only
        (0, 1, 2, 3, 4): 0,
        (0, 10, 11, 12): 1,
        (0, 1, 2, 5): 0,  # an answer was asked for again
        (0, 1, 6): 2,  # parts before the first prompt's end
        (7,): 3,
        (0, 1): 4,  # shorter than all that begin so
        (0, 1, 2, 3, 4, 8): 0,  # the longest counts
    }

    assert _sessions(tmp_path, [*prompts, (7,)]) == [*prompts.values(), 5]  # one page tells nothing


def test_generated_conversations_are_told_apart(tmp_path: Path) -> None:
    rng = random.Random(4)
    ids = count()
    systems = [[next(ids) for _ in range(length)] for length in (0, 1, 1, 5)]
    chats: list[list[int]] = []
    truth: list[int] = []
    prompts: list[tuple[int, ...]] = []
    for _ in range(400):
        which = rng.randrange(len(chats) + 1) if rng.random() < 0.5 else len(chats)
        if which == len(chats):
            chats.append([*rng.choice(systems), next(ids)])
        chats[which] += [next(ids) for _ in range(rng.randint(1, 4))]
        truth.append(which)
        prompts.append(tuple(chats[which]))
    assert len(chats) < 350

    assert _sessions(tmp_path, prompts) == truth


def _sessions(tmp_path: Path, prompts: list[tuple[int, ...]]) -> list[int]:
    rows = [
        {"timestamp": i, "input_length": 512 * len(pages) + 5, "output_length": 1, "hash_ids": [*pages, 10**6 + i]}
        for i, pages in enumerate(prompts)
    ]
    return [call.session for call in read_trace(write_lines(tmp_path / "t.jsonl", rows)).calls]


# -- agentic sessions --------------------------------------------------------------------------------------------


def test_a_subagents_prompts_change_its_own_not_its_parents(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "in": 2048, "out": 1, "h": [0, [[1, 32]]]},
        {
            "t": 10.0,
            "type": "subagent",
            "requests": [
                {"t": 1.0, "in": 1024, "out": 2, "h": [0, [[500, 16]]]},
                {"t": 90.0, "in": 2048, "out": 3, "h": [16, [[600, 8], [700, 8]]]},
            ],
        },
        {"t": 50.0, "in": 2048, "out": 4, "h": [16, [[800, 16]]]},
        {"t": 60.0, "in": 3072, "out": 0, "h": [32, [[900, 16]]]},
    ]
    path = write_lines(tmp_path / "t.jsonl.gz", [{"block_size": 64, "requests": requests}])

    trace = read_trace(path, span_s=10_000, seed=1)

    start_s = trace.calls[0].at_s
    assert [(round(c.at_s - start_s, 6), c.num_tokens, c.num_output) for c in trace.calls] == [
        (0.0, 2048, 1),
        (11.0, 1024, 2),
        (50.0, 2048, 4),
        (60.0, 3072, 1),
        (100.0, 2048, 3),
    ]
    first, sub, second, third, sub_again = (c.pages for c in trace.calls)
    assert [len(c.pages) for c in trace.calls] == [2, 1, 2, 3, 2]
    assert second[:1] == first[:1]
    assert second[1:] != first[1:]
    assert third[:2] == second
    assert sub_again[:1] == sub
    assert not {*sub, *sub_again} & {*first, *second, *third}
    assert {c.session for c in trace.calls} == {0}


@pytest.mark.parametrize(("name", "scale"), [("t.jsonl.gz", 1.0), ("t.jsonl", 0.25), ("t.jsonl.gz", 0.0625)])
def test_restored_sessions_equal_a_naive_decoder(tmp_path: Path, name: str, scale: float) -> None:
    sessions = _random_sessions(seed=int(scale * 16))
    assert any("requests" in row for session in sessions for row in session["requests"])
    span_s = 1e6  # longer than any of them: nothing is cut off

    trace = read_trace(write_lines(tmp_path / name, sessions), scale=scale, span_s=span_s)

    assert trace.page_size == 1024 * scale
    assert trace.calls == sorted(trace.calls, key=lambda call: call.at_s)
    by_session = defaultdict(list)
    for one in trace.calls:
        by_session[one.session].append(one)
    assert sorted(by_session) == list(range(len(sessions)))
    prefixes: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for number, session in enumerate(sessions):
        naive = sorted(_naive(session["requests"]), key=lambda row: row[0])
        calls = by_session[number]
        start_s = calls[0].at_s - naive[0][0]
        assert 0 <= start_s <= span_s
        assert [call.at_s for call in calls] == pytest.approx([start_s + at_s for at_s, *_ in naive])
        for call, (_, num_in, num_out, blocks) in zip(calls, naive, strict=True):
            assert (call.num_tokens, call.num_output) == (
                max(1, round(num_in * scale)),
                max(1, round(num_out * scale)),
            )
            assert len(call.pages) == min(call.num_tokens // trace.page_size, len(blocks) // GROUP)
            for i, page in enumerate(call.pages):
                prefixes[page].append((number, *blocks[: GROUP * (i + 1)]))
    # an id stands for one prefix of one session, and a prefix has one id
    assert all(len(set(stood_for)) == 1 for stood_for in prefixes.values())
    assert len({stood_for[0] for stood_for in prefixes.values()}) == len(prefixes)
    assert max(map(len, prefixes.values())) > 1, "nothing was shared, so nothing was tested"


def test_sessions_alike_in_every_block_share_nothing(tmp_path: Path) -> None:
    trace = read_trace(write_lines(tmp_path / "t.jsonl", [AGENTIC, AGENTIC, AGENTIC]))

    pages = [set(call.pages) for call in trace.calls]
    assert [len(some) for some in pages] == [2, 2, 2]
    assert len(set.union(*pages)) == 6


def test_sessions_start_anywhere_in_the_span_and_end_with_it(tmp_path: Path) -> None:
    session = {
        "block_size": 64,
        "requests": [{"t": 10.0 * i, "in": 70, "out": 1, "h": [0, [[1, 1]]]} for i in range(9)],
    }
    path = write_lines(tmp_path / "t.jsonl", [session] * 300)

    trace = read_trace(path, span_s=100.0, seed=5)

    starts = {}
    num_calls: dict[int, int] = defaultdict(int)
    for call in trace.calls:
        starts.setdefault(call.session, call.at_s)
        num_calls[call.session] += 1
    assert len(starts) == 300
    assert 0 <= min(starts.values()) < 10
    assert 90 < max(starts.values()) <= 100
    assert num_calls == {one: min(9, 1 + int((100.0 - start_s) / 10.0)) for one, start_s in starts.items()}
    assert read_trace(path, span_s=100.0, seed=5) == trace
    assert read_trace(path, span_s=100.0, seed=6) != trace
    assert 3000 < max(call.at_s for call in read_trace(path).calls) <= 3600


def _naive(requests: list[dict[str, Any]], offset_s: float = 0.0) -> Iterator[tuple[float, int, int, list[int]]]:
    """Time, tokens in and out, and all blocks of each request."""
    prompt: list[int] = []
    for row in requests:
        if "requests" in row:
            yield from _naive(row["requests"], offset_s + row["t"])
        else:
            kept, runs = row["h"]
            prompt = [prompt[i] for i in range(kept)]
            for start, length in runs:
                for i in range(length):
                    prompt.append(start + i)
            yield offset_s + row["t"], row["in"], row["out"], prompt


def _random_sessions(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)

    def requests(num: int, depth: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        at_s, length, fresh = 0.0, 0, 1
        for _ in range(num):
            at_s += rng.choice([0.0, 1.5, 30.0])
            if depth and rng.random() < 0.2:
                rows.append({"t": at_s, "agent_id": "a", "requests": requests(4, depth - 1)})
                continue
            kept = length if rng.random() < 0.6 else rng.randint(0, length)
            # blocks that begin alike and part, come again, or are new
            runs = [[rng.choice([1, fresh, fresh + 40]), rng.randint(1, 40)] for _ in range(rng.randint(0, 3))]
            length, fresh = kept + sum(n for _, n in runs), fresh + 50
            rows.append(
                {"t": at_s, "in": 64 * length + rng.randint(1, 63), "out": rng.randint(0, 9), "h": [kept, runs]}
            )
        return rows

    return [{"block_size": 64, "requests": requests(15, 2)} for _ in range(8)]


# -- what can't be read ------------------------------------------------------------------------------------------


def _raw(data: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(data)
        return path

    return write


def _rows(*rows: Any) -> Callable[[Path], Path]:
    return lambda path: write_lines(path, rows)


def _without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def _request(**change: Any) -> dict[str, Any]:
    return {**AGENTIC, "requests": [{**AGENTIC["requests"][0], **change}]}  # type: ignore[index]


def _agentic_without(key: str) -> dict[str, Any]:
    return {**AGENTIC, "requests": [_without(AGENTIC["requests"][0], key)]}  # type: ignore[index]


MISUSED = "(TypeError|ValueError|Expected|lacks)"
MALFORMED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda path: path, "No such file"),
    "a folder": (lambda path: path.mkdir() or path, "Is a directory"),  # type: ignore[func-returns-value]
    "nothing": (_raw(b""), "empty"),
    "empty lines": (_raw(b"\n \n"), "empty"),
    "no JSON": (_raw(b"hello"), "not JSON"),
    "a line that is no object": (_raw(b"[1]"), "[Oo]bject"),
    "no UTF-8": (_raw(b'{"at_s": "\xff\xfe"}'), "not JSON lines"),
    "a later line that is no JSON": (_raw(json.dumps(MOONCAKE).encode() + b"\n{"), "not JSON"),
    "keys of no format": (_rows({"when": 1, "what": 2}), "neither .*'when', 'what'"),
    "two formats": (_rows(MOONCAKE, SIMPLE), "(hash_ids|timestamp)"),
    "no requests": (_rows({"block_size": 64, "requests": []}), "no requests"),
    "ids that are no list": (_rows({**MOONCAKE, "hash_ids": 5}), MISUSED),
    "a length that is no number": (_rows({**MOONCAKE, "input_length": "x"}), MISUSED),
    "a time that is no number": (_rows({**MOONCAKE, "timestamp": None}), MISUSED),
    "pages that are no list": (_rows({**SIMPLE, "pages": None}), MISUSED),
    "times that don't compare": (_rows(SIMPLE, {**SIMPLE, "at_s": "x"}), MISUSED),
    "a session that is no name": (_rows({**SIMPLE, "session": [1]}), MISUSED),
    "a page size that is no number": (_rows({**SIMPLE, "page_size": "x"}), MISUSED),
    "a later session without requests": (_rows(AGENTIC, {"block_size": 64}), "requests"),
    "requests that are no list": (_rows({**AGENTIC, "requests": 5}), MISUSED),
    "a block size that is no number": (_rows({**AGENTIC, "block_size": None}), MISUSED),
    "a change that is no pair": (_rows(_request(h=[0])), MISUSED),
    "a run that is no pair": (_rows(_request(h=[0, [[1]]])), MISUSED),
    "a run that isn't numbers": (_rows(_request(h=[0, [["x", 2]]])), MISUSED),
    "a subagent of nothing": (_rows({**AGENTIC, "requests": [{"t": 0, "requests": None}]}), MISUSED),
    **{f"mooncake without {key}": (_rows(MOONCAKE, _without(MOONCAKE, key)), key) for key in MOONCAKE},
    **{f"simple without {key}": (_rows(SIMPLE, _without(SIMPLE, key)), key) for key in SIMPLE},
    **{f"a request without {key}": (_rows(AGENTIC, _agentic_without(key)), key) for key in ("t", "in", "out")},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_cannot_be_read_is_named_with_its_reason(tmp_path: Path, name: str) -> None:
    write, reason = MALFORMED[name]
    path = write(tmp_path / "t.jsonl")

    with pytest.raises(TraceError, match=re.escape(str(path)) + ".*" + reason):
        read_trace(path)


@pytest.mark.parametrize("data", [b"hello", gzip.compress(b"hello")], ids=["not packed", "packed nonsense"])
def test_packed_files_are_held_to_the_same(tmp_path: Path, data: bytes) -> None:
    path = _raw(data)(tmp_path / "t.jsonl.gz")

    with pytest.raises(TraceError, match=re.escape(str(path)) + ".*(gzip|JSON)"):
        read_trace(path)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.01, float("nan")])
def test_a_scale_has_limits(tmp_path: Path, scale: float) -> None:
    path = write_lines(tmp_path / "t.jsonl", [AGENTIC])

    with pytest.raises(TraceError, match="above 0 and at most 1"):
        read_trace(path, scale=scale)
