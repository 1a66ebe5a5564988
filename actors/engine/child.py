"""The engine's process: started with our plugin on its path, its output kept, ended with everything under it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from pathlib import Path
from typing import Final

import psutil

from actors.engine.plugin import DP_RANK_ENV
from actors.engine.serve import API_KEY_ENV, PARENT_ENV
from actors.engine.spec import EngineSpec

log = logging.getLogger(__name__)

TAIL_LINES: Final = 60
"""Lines of output that an error about the engine shows."""
_KEEP_ALIVE_S: Final = 120
"""Longer than routers keep idle connections (router/net/dispatch.py): SGLang's own 5 s would cut requests off."""
_LINE_BYTES: Final = 1 << 20
_ENTRY_POINTS: Final = """\
[sglang.srt.platforms]
loray_cpu = actors.engine.plugin:platform
[sglang.srt.plugins]
loray = actors.engine.plugin:register
"""
_METADATA: Final = "Metadata-Version: 2.1\nName: loray-engine-plugin\nVersion: 0\n"


def plugin_path(folder: Path) -> str:
    """PYTHONPATH under which SGLang finds our plugin, however loray itself came to this machine.

    Entry points are package metadata, which a Ray working_dir doesn't bring: write them into `folder`.
    """
    info = folder / "loray_engine_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    code = Path(__file__).resolve().parents[2]
    return os.pathsep.join(filter(None, [str(folder), str(code), os.environ.get("PYTHONPATH", "")]))


class EngineProcess:
    """One engine process. `start` and `stop` are called by one task; `tail` and `exit_code` may be read at any time."""

    def __init__(self, spec: EngineSpec, *, api_key: str, folder: Path) -> None:
        """`folder`: where the plugin's metadata may be written."""
        self._spec = spec
        self._api_key = api_key
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before the start."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode if self._process else None

    @property
    def tail(self) -> str:
        """Last lines of the engine's output."""
        return "\n".join(self._tail)

    async def start(self) -> None:
        """Start the process; returns as soon as it runs, long before it serves."""
        env = {
            **os.environ,
            "PYTHONPATH": plugin_path(self._folder),
            "PYTHONUNBUFFERED": "1",
            API_KEY_ENV: self._api_key,
            PARENT_ENV: str(os.getpid()),
            DP_RANK_ENV: str(self._spec.first_dp_rank),
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_S),
        }
        if self._spec.cpu_cores:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, self._spec.cpu_cores))
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *self._spec.command(),
            env=env,
            cwd=self._folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        self._reader = asyncio.create_task(self._read())

    async def wait(self) -> int:
        """Exit code, once it has ended and its output is read."""
        assert self._process is not None
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):  # what it had started just before may not have noticed its end
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1)
        return code

    async def stop(self) -> None:
        """Kill the process and all under it; an engine keeps nothing that a gentler end would save. Idempotent."""
        if self._process is None:
            return
        for member in _family(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        await self.wait()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # a line beyond the limit: its rest comes as lines of its own
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            log.info("engine: %s", text)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
