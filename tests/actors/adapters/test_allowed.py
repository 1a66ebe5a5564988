"""Claims of check_allowed in actors/adapters/sources.py: what lies under a root may be loaded, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.adapters.sources import SourceError, check_allowed
from tests.actors.adapters.making import make_adapter


@pytest.mark.parametrize(
    ("source", "root"),
    [
        ("/data/adapters/a", "/data/adapters"),
        ("/data/adapters", "/data/adapters/"),
        ("file:///data/adapters/a", "/data/adapters"),
        ("/data/adapters/a/../b", "file:///data/adapters"),
        ("memory://bucket/a", "memory://bucket"),
        ("memory://bucket/some/a", "memory://bucket/some/"),
        ("hf://org/repo@main/a", "hf://org"),
    ],
)
def test_what_lies_under_a_root_is_allowed(source: str, root: str) -> None:
    check_allowed(source, ["/nowhere", "s3://nowhere", root])


@pytest.mark.parametrize(
    ("source", "root"),
    [
        ("/data/other", "/data/adapters"),
        ("/data/adapters2/a", "/data/adapters"),
        ("/data/adapters/../other", "/data/adapters"),
        ("file:///data/adapters/%2e%2e/other", "/data/adapters"),
        ("memory://bucket2/a", "memory://bucket"),
        ("memory://bucket/some2", "memory://bucket/some"),
        ("memory://bucket/some/../other", "memory://bucket/some"),
        ("https://host/some/%2e%2e/other", "https://host/some"),
        ("s3://bucket/a", "memory://bucket"),
        ("/data/adapters", "memory://data"),
        ("memory://data/adapters", "/data/adapters"),
        ("hf://org2/repo", "hf://org"),
    ],
)
def test_what_lies_elsewhere_is_refused(source: str, root: str) -> None:
    with pytest.raises(SourceError, match=r"lies under none of the folders and URIs in lora\.roots \("):
        check_allowed(source, [root])


def test_a_link_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", make_adapter(tmp_path / "outside")
    inside.mkdir()
    (inside / "link").symlink_to(outside)

    with pytest.raises(SourceError, match="lies under none"):
        check_allowed(str(inside / "link"), [str(inside)])


def test_nothing_is_allowed_where_there_are_no_roots() -> None:
    with pytest.raises(SourceError, match=r"in lora\.roots \(none\); add its parent there"):
        check_allowed("/data/a", [])
