"""Where generated models live on this machine. The only reader of LORAY_CACHE.

Called by the command line of this package and by whoever wants a generated model's folder.
Knows nothing about what is in the folders.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return loray's cache folder: $LORAY_CACHE, else ~/.cache/loray. It need not exist yet."""
    return Path(os.environ.get("LORAY_CACHE") or "~/.cache/loray").expanduser()


def model_dir(name: str) -> Path:
    """Return the folder of the generated model `name`, whether or not it has been built."""
    return cache_dir() / "models" / name
