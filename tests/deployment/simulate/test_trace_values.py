"""deployment/simulate/trace.py refuses what would break a simulation later, and says on which line it stands."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deployment.simulate.trace import TraceError, read_trace
from tests.deployment.simulate.test_trace import AGENTIC, MOONCAKE, SIMPLE
from tests.deployment.simulate.traces import write_lines

REQUEST: dict[str, Any] = AGENTIC["requests"][0]  # type: ignore[index,assignment]


@pytest.mark.parametrize(
    ("good", "change", "reason"),
    [
        # neither a list of ids that fit a token...
        *((MOONCAKE, {"hash_ids": ids}, "hash_ids") for ids in ("x", ["a"], [-1], [1 << 32], [1.5], [[1]])),
        *((SIMPLE, {"pages": ids}, "pages") for ids in ("x", {}, ["a"], [-1], [1 << 32], [1.5], [[1]])),
        # ... nor lengths, times and names
        *((MOONCAKE, {"input_length": n}, "input_length") for n in (-5, 0, True)),
        *((SIMPLE, {"input_tokens": n}, "input_tokens") for n in (None, "x", -5, 0, 1.5, [1], True)),
        *((SIMPLE, {"output_tokens": n}, "output_tokens") for n in (-5, 1.5)),
        *((MOONCAKE, {"output_length": n}, "output_length") for n in (-5, 1.5)),
        *((SIMPLE, {"page_size": n}, "page_size") for n in (0, -1, 1.5)),
        (SIMPLE, {"adapter": 5}, "adapter"),
        (AGENTIC, {"block_size": 0}, "block_size"),
        (AGENTIC, {"block_size": 128}, "block_size is 128 here and 64 before"),
        *((AGENTIC, {"requests": [{**REQUEST, "in": n}]}, "in") for n in (-5, 1.5)),
        (AGENTIC, {"requests": [{key: value for key, value in REQUEST.items() if key != "h"}]}, "lacks h"),
        (AGENTIC, {"requests": [{**REQUEST, "h": [-1, []]}]}, "h"),
        (AGENTIC, {"requests": [{**REQUEST, "h": [0, [[1, -4]]]}]}, "h"),
        (AGENTIC, {"requests": [{**REQUEST, "h": [5, []]}]}, "keeps 5 blocks of 0"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    tmp_path: Path, good: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    path = write_lines(tmp_path / "t.jsonl", [good, {**good, **change}])

    with pytest.raises(TraceError, match=re.escape(f"{path}:2: ") + ".*" + reason):
        read_trace(path)


@pytest.mark.parametrize("at_s", [None, "x", [1]])
def test_a_time_is_a_number_on_a_line_alone_too(tmp_path: Path, at_s: Any) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{**SIMPLE, "at_s": at_s}])

    with pytest.raises(TraceError, match="at_s"):
        read_trace(path)


def test_a_simple_trace_has_one_page_size(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{**SIMPLE, "page_size": 64}, {**SIMPLE, "page_size": 128}])

    with pytest.raises(TraceError, match="page_size is 128 here and 64 before"):
        read_trace(path)


def test_ids_beyond_a_prompts_full_pages_are_left_out_of_simple_traces_too(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", [{**SIMPLE, "pages": [1, 2, 3], "input_tokens": 1100}])

    assert read_trace(path).calls[0].pages == (1, 2)


@pytest.mark.parametrize("damage", ["cut", "cut early", "overwritten"])
def test_a_packed_file_that_is_damaged_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    whole = gzip.compress((json.dumps(AGENTIC) + "\n").encode() * 50)
    path.write_bytes(
        {"cut": whole[:-20], "cut early": whole[:30], "overwritten": whole[:15] + b"\xff" * 8 + whole[23:]}[damage]
    )

    with pytest.raises(TraceError, match=re.escape(str(path))):
        read_trace(path)
