"""Adapter sources: any URI to a folder of this node, fetched once however many ask, and never half.

A node keeps adapters under their content id: `<cache>/<content id>/`. Copies of local folders are kept too, since a
folder that is edited in place would otherwise change weights under an id that says it hadn't. A fetch goes to a
scratch folder first and is renamed when it is whole; a lock file per source lets one process of the node fetch and
the others wait. Least recently used contents go when the cache is over its size.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from actors.engine.identity import CONFIG_FILE, WEIGHT_FILES, AdapterFilesError, adapter_files, content_id

log = logging.getLogger(__name__)

HUB: Final = "hf"
_SCRATCH: Final = ".fetching-"
_ABANDONED_S: Final = 24 * 3600.0
"""No fetch takes so long."""


class SourceError(ValueError):
    """The source can't be read, or may not be; the message says why."""


def check_allowed(source: str, roots: Sequence[str]) -> None:
    """Raise SourceError unless `source` lies under one of `roots` (folders or URI prefixes), links followed."""
    try:
        allowed = _is_allowed(source, roots)
    except (ValueError, RuntimeError, OSError) as exc:  # no URI, a user's home that isn't there, a byte no path holds
        raise SourceError(f"{source!r} can't be read: {exc}") from exc
    if not allowed:
        listed = ", ".join(roots) or "none"
        raise SourceError(
            f"{source} lies under none of the folders and URIs in lora.roots ({listed}); add its parent there"
        )


def _is_allowed(source: str, roots: Sequence[str]) -> bool:
    local = local_path(source)
    for root in roots:
        root_path = local_path(root)
        if local is not None and root_path is not None:
            if all(path.resolve().is_relative_to(root_path.resolve()) for path in (local, *_parts(local))):
                return True
        elif local is None and root_path is None and _is_under(source, root):
            return True
    return False


def _parts(folder: Path) -> list[Path]:
    """The adapter's files: a link among them may lead elsewhere than their folder."""
    return [folder / name for name in (CONFIG_FILE, *WEIGHT_FILES)]


def local_path(source: str) -> Path | None:
    """The folder that a source names on this node; None for a remote one. Raises SourceError."""
    parts = urlsplit(source)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise SourceError(f"{source}: a file URI can't name another host")
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(source).expanduser()


class AdapterCache:
    """One node's adapters. Safe for many processes; every method blocks."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def fetch(self, source: str, expected: str | None = None) -> Path:
        """Folder of the adapter at `source`; its name is its content id.

        With `expected`, what this node has under that content id is taken without looking at the source.

        Raises:
            SourceError: it can't be read, isn't an adapter, or has another content than `expected`.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if expected is not None and self._has(expected):
                return self._folder / expected
            with self._locked(source):
                if expected is not None and self._has(expected):
                    return self._folder / expected
                return self._fetch(source, expected)
        except SourceError:
            raise
        except AdapterFilesError as exc:
            raise SourceError(str(exc)) from exc
        except Exception as exc:  # hubs and object stores have errors of their own
            raise SourceError(f"{source!r} can't be read: {type(exc).__name__}: {exc}") from exc

    def _has(self, content: str) -> bool:
        """Whether it is here; it then counts as used now."""
        folder = self._folder / content
        if not folder.is_dir():
            return False
        os.utime(folder)
        return True

    def _fetch(self, source: str, expected: str | None) -> Path:
        with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=self._folder) as scratch:
            got = Path(scratch) / "adapter"
            got.mkdir()
            _download(source, got)
            adapter_files(got)
            content = content_id(got)
            if expected is not None and content != expected:
                raise SourceError(f"{source} has changed: content {content[:12]} instead of {expected[:12]}; reload it")
            target = self._folder / content
            if not self._has(content):
                with contextlib.suppress(OSError):  # another source of the same content was faster
                    got.rename(target)
            if not target.is_dir():
                raise SourceError(f"{source}: {target} can't be made")
        self._prune(keep=target)
        return target

    def _prune(self, *, keep: Path) -> None:
        """Remove what was used longest ago, down to the size. An engine has read what it loaded."""
        with self._locked("prune"):  # no source: those are paths and URIs
            self._remove(keep)

    def _remove(self, keep: Path) -> None:
        before_s = time.time() - _ABANDONED_S
        for path in self._folder.glob(f"{_SCRATCH}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before_s:  # its process was killed
                    shutil.rmtree(path, ignore_errors=True)
        kept = [p for p in self._folder.iterdir() if p.is_dir() and not p.name.startswith(_SCRATCH)]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in kept}
        total = sum(sizes.values())
        for path in sorted(kept, key=lambda path: path.stat().st_mtime):
            if total <= self._max_bytes:
                return
            if path != keep:
                doomed = self._folder / f"{_SCRATCH}{path.name}"
                path.rename(doomed)  # at once, so that nobody sees half of it
                shutil.rmtree(doomed, ignore_errors=True)
                total -= sizes[path]

    @contextmanager
    def _locked(self, source: str) -> Iterator[None]:
        name = hashlib.sha256(source.encode()).hexdigest()[:24]
        with (self._folder / f".lock-{name}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _download(source: str, folder: Path) -> None:
    """Put the adapter's files into `folder`. Raises SourceError, and whatever hubs and stores raise."""
    local = local_path(source)
    if local is not None:
        for file in adapter_files(local):
            shutil.copyfile(file, folder / file.name)
    elif urlsplit(source).scheme == HUB:
        _download_hub(source, folder)
    else:
        _download_any(source, folder)


def _download_hub(source: str, folder: Path) -> None:
    """hf://org/repo[@revision][/folder], through huggingface_hub."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    rest = source.removeprefix("hf://").strip("/")
    owner, _, tail = rest.partition("/")
    repo, _, inside = tail.partition("/")
    repo, _, revision = repo.partition("@")
    if not owner or not repo:
        raise SourceError(f"{source}: write hf://org/repo[@revision][/folder]")
    try:
        for name in (CONFIG_FILE, *WEIGHT_FILES):
            try:
                got = hf_hub_download(
                    f"{owner}/{repo}", f"{inside}/{name}" if inside else name, revision=revision or None
                )
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
            shutil.copyfile(got, folder / name)
            if name in WEIGHT_FILES:
                return
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as exc:
        raise SourceError(f"{source}: {str(exc).splitlines()[0]}") from exc


def _download_any(source: str, folder: Path) -> None:
    """Any URI that fsspec reads; object stores need their own packages (s3fs, gcsfs, ...)."""
    import fsspec

    filesystem, root = fsspec.url_to_fs(source)
    for name in (CONFIG_FILE, *WEIGHT_FILES):
        path = f"{root.rstrip('/')}/{name}"
        try:
            filesystem.info(path)  # `isfile` would take a store that can't be reached for one without the file
        except FileNotFoundError:
            continue
        filesystem.get_file(path, str(folder / name))
        if name in WEIGHT_FILES:
            return


def _is_under(source: str, root: str) -> bool:
    """Whether a URI lies under another, `..` refused."""
    ours, theirs = urlsplit(source), urlsplit(root)
    path, base = PurePosixPath(unquote(ours.path) or "/"), PurePosixPath(theirs.path or "/")
    same = (ours.scheme, ours.netloc) == (theirs.scheme, theirs.netloc)
    return same and ".." not in path.parts and path.is_relative_to(base)
