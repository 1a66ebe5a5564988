"""Free TCP ports for an engine's sockets, in runs of neighbours."""

from __future__ import annotations

import random
import socket
from typing import Final

_FIRST: Final = 20_000
_LAST: Final = 32_000
"""Below the range from which Linux takes ports of outgoing connections."""
_TRIES: Final = 200


class NoPortsError(OSError):
    """The wanted ports are in use; the message names them."""


def reserve(host: str, count: int, *, first: int | None, rng: random.Random) -> int:
    """First of `count` free neighbouring ports of `host`: from `first` on, or anywhere when None.

    They are free now; whoever binds them later must still be ready to find one taken. Raises NoPortsError.
    """
    if first is not None:
        if not _free(host, first, count):
            raise NoPortsError(f"ports {first} to {first + count - 1} of {host} are not all free")
        return first
    for _ in range(_TRIES):
        candidate = rng.randrange(_FIRST, _LAST - count)
        if _free(host, candidate, count):
            return candidate
    raise NoPortsError(f"no {count} neighbouring free ports of {host} between {_FIRST} and {_LAST}")


def _free(host: str, first: int, count: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, first + count):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True
