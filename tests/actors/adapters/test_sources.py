"""Claims of actors/adapters/sources.py: any URI is fetched once, whole, under its content id, or refused."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import fsspec
import huggingface_hub
import huggingface_hub.constants
import pytest

from actors.adapters.sources import AdapterCache, SourceError, check_allowed
from actors.engine.identity import WEIGHT_FILES, content_id
from tests.actors.adapters.making import make_adapter

PLENTY = 1 << 30


@pytest.fixture
def cache(tmp_path: Path) -> AdapterCache:
    return AdapterCache(tmp_path / "cache", max_bytes=PLENTY)


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def kept(tmp_path: Path) -> set[str]:
    """What the cache holds beside its lock files: content ids, and scratch folders if any were left."""
    return {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}


def fetched_in_process(folder: Path, source: str, times: int) -> set[str]:
    cache = AdapterCache(folder, max_bytes=PLENTY)
    with ThreadPoolExecutor(8) as pool:
        return {str(path) for path in pool.map(cache.fetch, [source] * times)}


# -- fetching ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "{}/../my adapter/"])
def test_a_local_folder_is_copied_under_its_content_id(cache: AdapterCache, tmp_path: Path, form: str) -> None:
    source = make_adapter(tmp_path / "my adapter")
    uri = form.format(source).replace(" ", "%20") if form.startswith("file:") else form.format(source)

    got = cache.fetch(uri)

    assert got == tmp_path / "cache" / content_id(source)
    assert content_id(got) == got.name
    assert kept(tmp_path) == {got.name}


def test_only_the_adapters_own_files_are_copied(cache: AdapterCache, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "a")
    (source / "optimizer.pt").write_bytes(bytes(1000))

    assert sorted(os.listdir(cache.fetch(str(source)))) == ["adapter_config.json", WEIGHT_FILES[0]]


def test_a_source_that_is_edited_later_does_not_change_the_copy(cache: AdapterCache, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "a")
    got = cache.fetch(str(source))

    with (source / WEIGHT_FILES[0]).open("r+b") as stream:
        stream.write(b"edited in place")

    assert content_id(got) == got.name
    assert cache.fetch(str(source)) != got


def test_what_is_expected_and_here_is_taken_without_looking_at_the_source(cache: AdapterCache, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "a")
    got = cache.fetch(str(source))
    shutil.rmtree(source)

    assert cache.fetch(str(source), got.name) == got
    assert cache.fetch("s3://nowhere/at/all", got.name) == got


def test_a_source_that_has_changed_is_refused_with_both_ids(cache: AdapterCache, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "a", seed=1)
    former = content_id(source)
    present = content_id(make_adapter(source, seed=2))

    with pytest.raises(SourceError, match=f"has changed: content {present[:12]} instead of {former[:12]}; reload it"):
        cache.fetch(str(source), former)
    assert kept(tmp_path) == set()


@pytest.mark.parametrize("missing", ["everything", "adapter_config.json", WEIGHT_FILES[0]])
@pytest.mark.parametrize("scheme", ["", "memory:/"])
def test_what_is_no_adapter_is_a_source_error_and_leaves_nothing(
    cache: AdapterCache, memory: fsspec.AbstractFileSystem, tmp_path: Path, scheme: str, missing: str
) -> None:
    source = make_adapter(tmp_path / "a")
    shutil.rmtree(source) if missing == "everything" else (source / missing).unlink()
    if scheme and source.exists():
        memory.put(str(source), str(source), recursive=True)

    with pytest.raises(SourceError):
        cache.fetch(f"{scheme}{source}")
    assert kept(tmp_path) == set()


def test_a_download_that_breaks_off_leaves_nothing(
    cache: AdapterCache, memory: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: str, target: str) -> None:
        Path(target).write_bytes(b"half")
        raise ConnectionResetError("the wire is cut")

    memory.put(str(make_adapter(tmp_path / "a")), "/bucket/a", recursive=True)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "get_file", broken)
        with pytest.raises(SourceError, match=r"'memory://bucket/a' can't be read: Connection.*: the wire is cut"):
            cache.fetch("memory://bucket/a")
    assert kept(tmp_path) == set()

    assert cache.fetch("memory://bucket/a").name == content_id(tmp_path / "a")


def test_any_uri_that_fsspec_reads_is_a_source(
    cache: AdapterCache, memory: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    source = make_adapter(tmp_path / "a")
    memory.put(str(source), "/bucket/some/a", recursive=True)

    assert [cache.fetch(uri).name for uri in ("memory://bucket/some/a", "memory://bucket/some/a/")] == (
        [content_id(source)] * 2
    )


@pytest.mark.parametrize(
    "source",
    [
        "hf://org",
        "hf://",
        "hf:///repo",
        "hf://org/@main",
        "hf://or g/re po",
        "file://otherhost/a",
        "nosuchscheme://x/y",
        "s3://[not-an-address/x",
        "/a\0b",
        "~nosuchuser/a",
    ],
)
def test_a_malformed_source_is_a_source_error(cache: AdapterCache, source: str) -> None:
    with pytest.raises(SourceError):
        cache.fetch(source)
    with pytest.raises(SourceError):
        check_allowed(source, ["/", "hf://orgs"])


def test_a_hub_that_cannot_be_reached_is_a_source_error(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    with pytest.raises(SourceError, match=r"^hf://org/repo@main/inside: "):
        cache.fetch("hf://org/repo@main/inside")
    assert kept(tmp_path) == set()


# -- many at once ------------------------------------------------------------------------------------------------------


def test_threads_and_processes_that_fetch_at_once_share_one_copy(tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "a")
    folder = tmp_path / "cache"
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        others = [pool.submit(fetched_in_process, folder, str(source), 20) for _ in range(2)]
        got = fetched_in_process(folder, str(source), 20).union(*(one.result(60) for one in others))

    assert got == {str(folder / content_id(source))}
    assert kept(tmp_path) == {content_id(source)}


def test_who_expects_the_same_content_at_once_waits_for_one_download(
    cache: AdapterCache, memory: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    second, kind = threading.Event(), type(memory)
    get_file = kind.get_file

    def noted(files: fsspec.AbstractFileSystem, path: str, target: str) -> None:
        calls.append(path)
        if len(calls) > 2:  # each downloads two files
            second.set()
        second.wait(0.1)
        get_file(files, path, target)

    memory.put(str(make_adapter(tmp_path / "a")), "/bucket/a", recursive=True)
    monkeypatch.setattr(kind, "get_file", noted)
    expected = content_id(tmp_path / "a")
    with ThreadPoolExecutor(8) as pool:
        got = set(pool.map(lambda _: cache.fetch("memory://bucket/a", expected), range(8)))

    assert [path.name for path in got] == [expected]
    assert len(calls) == 2


def test_two_sources_of_the_same_content_that_are_whole_at_once_share_one_copy(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [str(make_adapter(tmp_path / name)) for name in "ab"]
    meeting, rename = threading.Barrier(2, timeout=1.0), Path.rename

    def together(path: Path, target: Path) -> Path:
        try:  # both have seen that nothing is there yet, or one alone may go on
            meeting.wait()
        except threading.BrokenBarrierError:
            meeting.abort()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", together)
    with ThreadPoolExecutor(2) as pool:
        got = set(pool.map(cache.fetch, sources))

    assert got == {tmp_path / "cache" / content_id(tmp_path / "a")}
    assert kept(tmp_path) == {content_id(tmp_path / "a")}


# -- size --------------------------------------------------------------------------------------------------------------


def sized(tmp_path: Path, count: int) -> AdapterCache:
    """A cache with room for `count` adapters."""
    probe = make_adapter(tmp_path / "probe")
    return AdapterCache(tmp_path / "cache", max_bytes=count * sum(file.stat().st_size for file in probe.iterdir()))


def fetch_at(cache: AdapterCache, source: Path, at_s: float) -> str:
    """Fetch for the first time, as if it were `at_s`; returns the content id."""
    got = cache.fetch(str(source))
    os.utime(got, (at_s, at_s))
    return got.name


def test_a_cache_that_is_over_its_size_keeps_the_newest(tmp_path: Path) -> None:
    cache = sized(tmp_path, 2)
    sources = [make_adapter(tmp_path / str(seed), seed=seed) for seed in range(4)]

    contents = [fetch_at(cache, source, 1000.0 + i) for i, source in enumerate(sources)]

    assert kept(tmp_path) == set(contents[2:])


@pytest.mark.parametrize("expects", [True, False])
def test_what_was_fetched_again_lately_is_kept(tmp_path: Path, expects: bool) -> None:
    cache = sized(tmp_path, 2)
    a, b, c = (make_adapter(tmp_path / str(seed), seed=seed) for seed in range(3))
    contents = [fetch_at(cache, a, 1000.0), fetch_at(cache, b, 1001.0)]

    cache.fetch(str(a), contents[0] if expects else None)

    assert kept(tmp_path) == set(contents)
    assert {contents[0], cache.fetch(str(c)).name} == kept(tmp_path)


def test_what_was_just_fetched_is_kept_though_it_is_too_large(tmp_path: Path) -> None:
    cache = AdapterCache(tmp_path / "cache", max_bytes=1)
    for seed in range(2):
        assert {cache.fetch(str(make_adapter(tmp_path / str(seed), seed=seed))).name} == kept(tmp_path)


# -- errors of others --------------------------------------------------------------------------------------------------


class HubError(Exception):
    """As hubs and object stores have their own."""


def test_any_error_on_the_way_is_told_with_the_source(
    cache: AdapterCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reset(*_: object, **__: object) -> str:
        raise HubError("connection reset")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", reset)
    with pytest.raises(SourceError, match=r"'hf://org/repo' can't be read: HubError: connection reset"):
        cache.fetch("hf://org/repo")
    assert kept(tmp_path) == set()


def test_a_store_that_cannot_be_reached_is_not_one_without_the_files(
    cache: AdapterCache, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(type(memory), "info", unreachable)
    with pytest.raises(SourceError, match="no route to host"):
        cache.fetch("memory://adapters/one")


def test_what_a_killed_fetch_has_left_is_removed_in_time(cache: AdapterCache, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "source")
    cache.fetch(str(source))
    for name, age_s in ((".fetching-old", 2 * 24 * 3600), (".fetching-new", 60)):
        (tmp_path / "cache" / name).mkdir()
        at_s = time.time() - age_s
        os.utime(tmp_path / "cache" / name, (at_s, at_s))

    cache.fetch(str(make_adapter(tmp_path / "other", seed=2)))

    assert {name for name in kept(tmp_path) if name.startswith(".")} == {".fetching-new"}
