"""Where emulated engines of a machine come from: one process that has SGLang imported, and forks.

Importing SGLang takes ten seconds and 600 MB; a fork takes neither. Launchers (`__main__`) connect to a socket, hand
over their output and what to run, and stay: an engine ends when its launcher's connection closes, and the launcher
when the engine's does. The nursery ends when it has had no engine for a while.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Final

IDLE_S: Final = 10.0
_MAX_MESSAGE: Final = 1 << 20


def main(path: str) -> None:
    """Listen at `path` until idle."""
    from actors.engine.emulated import host

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.path.exists(path):
        os.unlink(path)
    listener.bind(path)
    listener.listen(512)
    gc.collect()
    gc.freeze()  # what is imported stays shared
    children: set[int] = set()
    while True:
        ready, _, _ = select.select([listener], [], [], IDLE_S)
        children = {pid for pid in children if os.waitpid(pid, os.WNOHANG) == (0, 0)}
        if not ready:
            if not children:
                os.unlink(path)
                return
            continue
        connection, _ = listener.accept()
        message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE, 2)
        if not message:
            connection.close()
            continue
        pid = os.fork()
        if pid == 0:
            listener.close()
            _engine(host, connection, message, fds)
        children.add(pid)
        connection.close()
        for fd in fds:
            os.close(fd)


def _engine(host: object, connection: socket.socket, message: bytes, fds: list[int]) -> None:
    """The child: never returns."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.setsid()
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for fd in fds:
            os.close(fd)
        wanted = json.loads(message)
        os.chdir(wanted["folder"])
        host.run(  # type: ignore[attr-defined]  # the module, imported before the fork
            wanted["profile"],
            wanted["arguments"],
            api_key=wanted["api_key"],
            first_dp_rank=wanted["first_dp_rank"],
            life=connection,
        )
        code = 0
    except BaseException:  # noqa: BLE001  # the last line of a process: told on its output
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
