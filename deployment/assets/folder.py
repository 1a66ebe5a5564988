"""All-or-nothing model folders: a folder under its final name is always complete.

Called by the command line of this package. Knows which files make a folder a loadable model, not
how they are made.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Without one of these neither transformers nor SGLang loads the folder.
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class AssetError(Exception):
    """An asset cannot be built here; the message says what to do about it."""


def is_complete(folder: Path) -> bool:
    """Tell whether `folder` holds a loadable model."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def ensure(out: Path, build: Callable[[Path], None]) -> bool:
    """Make `out` a complete model folder; return False if it already was one.

    `build` writes into an empty folder beside `out`, which is renamed when it returns. If it raises
    or the process dies, `out` is untouched. Of two processes that build the same folder, the first
    one to finish wins. Raises AssetError if `out` holds other files: they are never overwritten.
    """
    if is_complete(out):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise AssetError(f"{out} exists and is no complete model folder; remove it or choose another --out")
    with _staged(out) as staging:
        build(staging)
        if not is_complete(staging):
            raise AssertionError(f"builder left {sorted(p.name for p in staging.iterdir())}")
    return True


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Yield an empty folder, beside `out`, that becomes `out` if the block ends without an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as parent:
        staging = Path(parent) / out.name
        staging.mkdir()
        yield staging
        try:
            os.replace(staging, out)
        except OSError:
            if not is_complete(out):
                raise
