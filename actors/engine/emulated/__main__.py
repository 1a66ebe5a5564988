"""Launcher of an emulated engine: `python -m actors.engine.emulated PROFILE <SGLang's arguments>`.

Small, since it stays for the engine's life: it imports little but the standard library. The engine is a fork of the
machine's nursery, which is started where there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from actors.engine.plugin import DP_RANK_ENV
from actors.engine.serve import API_KEY_ENV, die_with_parent

_START_S: Final = 120.0
_LOOK_S: Final = 0.05


def main() -> int:
    """Exit status of the engine, or 1 if it was killed."""
    die_with_parent()
    profile, *arguments = sys.argv[1:]
    message = {
        "profile": profile,
        "arguments": arguments,
        "api_key": os.environ.get(API_KEY_ENV, ""),
        "first_dp_rank": int(os.environ.get(DP_RANK_ENV, "0")),
        "folder": os.getcwd(),
    }
    connection = _connect()
    socket.send_fds(connection, [json.dumps(message).encode()], [1, 2])
    connection.recv(1)  # returns when the engine's end closes
    return 1


def _connect() -> socket.socket:
    """A connection to the nursery of this code and user; starts it where there is none."""
    code = Path(__file__).resolve().parents[3]
    digest = hashlib.sha256(f"{sys.executable}\0{code}\0{os.getuid()}".encode()).hexdigest()[:16]
    path = os.path.join(tempfile.gettempdir(), f"loray-nursery-{digest}.sock")
    until_s = time.monotonic() + _START_S
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _try(path)
        if connection is None:
            _start(path, code)
        while connection is None:
            if time.monotonic() > until_s:
                sys.exit(f"the nursery of emulated engines doesn't answer at {path}")
            time.sleep(_LOOK_S)
            connection = _try(path)
    return connection


def _try(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
        connection.connect(path)
        return connection
    connection.close()
    return None


def _start(path: str, code: Path) -> None:
    """A nursery that is nobody's child: it outlives whoever happened to need it first."""
    if os.fork() == 0:
        subprocess.Popen(
            [sys.executable, "-m", "actors.engine.emulated.nursery", path],
            cwd=code,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    sys.exit(main())
