"""deployment/simulate/workload.py refuses what can't be played, and says what can."""

from __future__ import annotations

import gzip
import math
import re
from pathlib import Path
from typing import Any

import pytest

from deployment.simulate.trace import TraceError
from deployment.simulate.workload import Traffic, play
from tests.deployment.simulate.traces import chats

CHATS = chats(20, gap_s=1.0)
HEADER = "model,client,hour,rate_per_s\n"


@pytest.mark.parametrize(
    "change",
    [
        *({"rate": rate} for rate in (0.0, math.nan, math.inf)),
        *({"burstiness": burstiness} for burstiness in (0.5, math.nan, math.inf)),
        *({"max_calls": num} for num in (0, -1)),
        *({"reload_s": often_s} for often_s in (0.0, -1.0, math.nan)),
    ],
)
def test_numbers_out_of_range_are_refused_with_all_ranges(change: dict[str, Any]) -> None:
    said = "rate must be above 0, burstiness at least 1, adapters at least 0, max_calls at least 1, reload_s above 0"

    with pytest.raises(ValueError, match=said):
        play(CHATS, Traffic(**change), seed=1)


@pytest.mark.parametrize(
    "popularity",
    [
        *(f"zipf{value}" for value in ("", ":", ":x", ":-1", ":-5000", ":nan", ":inf")),
        *(f"power{value}" for value in ("", ":", ":x", ":0", ":-1", ":nan", ":inf")),
        *("uniform:3", "drift", "drift:"),
    ],
)
def test_any_bad_popularity_is_told_all_good_ones(popularity: str) -> None:
    said = r"uniform, zipf:A .*, power:A .*, or drift:FILE, got " + re.escape(repr(popularity))

    with pytest.raises(ValueError, match=said):
        play(CHATS, Traffic(adapters=3, popularity=popularity), seed=1)


@pytest.mark.parametrize(
    "data",
    [
        HEADER.encode(),
        f"{HEADER}m,c,3\n".encode(),
        f"{HEADER}m,c,x,1\n".encode(),
        f"{HEADER}m,c,1,-3\n".encode(),
        f"{HEADER}m,c,1,nan\n".encode(),
        b"\xff\xfe",
        gzip.compress(HEADER.encode() + b"m,c,1,3\n" * 100)[:-10],
    ],
    ids=["no lines", "a short line", "an hour that is none", "a negative rate", "no rate", "no text", "a cut file"],
)
def test_a_file_without_rates_is_a_trace_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / ("rates.csv.gz" if data[:1] == b"\x1f" else "rates.csv")
    path.write_bytes(data)

    with pytest.raises(TraceError, match=re.escape(str(path)) + ".*model,client,hour,rate_per_s"):
        play(CHATS, Traffic(adapters=3, popularity=f"drift:{path}"), seed=1)
