"""Main program of an engine process: SGLang's own server, tied to the life of the worker that started it.

`python -m actors.engine.serve --model-path ...` takes SGLang's own arguments. The API key comes by environment,
so that no process list shows it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

API_KEY_ENV: Final = "LORAY_API_KEY"
PARENT_ENV: Final = "LORAY_PARENT_PID"
ENGINE_ENV: Final = "LORAY_ENGINE_PID"
"""This process, for SGLang's own children."""
_PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    """Have the kernel end this process when the thread that started it ends; SGLang's own children follow it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = int(os.environ.get(PARENT_ENV, "0"))
    if parent and os.getppid() != parent:  # it ended before the line above
        sys.exit(f"worker process {parent} is gone")


def main() -> None:
    """Serve until killed."""
    die_with_parent()
    os.environ[ENGINE_ENV] = str(os.getpid())
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = sys.argv[1:]
    if key := os.environ.pop(API_KEY_ENV, ""):
        arguments += ["--api-key", key]
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
