"""A Ray cluster of our own on this machine: loopback only, its head in one process group that we can end by id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import psutil

_HOST: Final = "127.0.0.1"
_START_S: Final = 90.0
_STOP_S: Final = 20.0
_POLL_S: Final = 0.25
_DASHBOARD_PORT: Final = 8265


class LocalRay(msgspec.Struct, frozen=True, kw_only=True):
    """A running head. `created_s` tells its process from a later one with the same id."""

    pid: int
    created_s: float
    address: str
    dashboard: str

    @property
    def alive(self) -> bool:
        """Whether the head still runs."""
        try:
            return psutil.Process(self.pid).create_time() == self.created_s
        except psutil.NoSuchProcess:
            return False

    def environment(self) -> dict[str, str]:
        """Environment in which Ray's tools and drivers find this cluster."""
        return {**_environment(), "RAY_ADDRESS": self.address}

    def stop(self) -> None:
        """End the head and everything under it; idempotent."""
        if not self.alive:
            return
        head = psutil.Process(self.pid)
        family = [head, *head.children(recursive=True)]
        head.send_signal(signal.SIGTERM)  # `ray start --block` ends its processes on it
        _, left = psutil.wait_procs(family, timeout=_STOP_S)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_STOP_S)


def start(folder: Path, *, extra: Mapping[str, str] | None = None) -> LocalRay:
    """Start a head; logs go to `folder`/ray.log. `extra` is added to its environment. Raises RuntimeError."""
    folder.mkdir(parents=True, exist_ok=True)
    port, dashboard_port = _free_port(), _free_port(_DASHBOARD_PORT)
    log = folder / "ray.log"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
        f"--node-ip-address={_HOST}", f"--port={port}", f"--dashboard-host={_HOST}",
        f"--dashboard-port={dashboard_port}", "--include-dashboard=true",
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment() | dict(extra or {}),
        )
    ray = LocalRay(
        pid=process.pid,
        created_s=psutil.Process(process.pid).create_time(),
        address=f"{_HOST}:{port}",
        dashboard=f"http://{_HOST}:{dashboard_port}",
    )
    until_s = time.monotonic() + _START_S
    while not _listens(dashboard_port):
        if process.poll() is not None or time.monotonic() > until_s:
            ray.stop()
            raise RuntimeError(f"Ray did not start; the end of {log}:\n{log.read_text()[-2000:]}")
        time.sleep(_POLL_S)
    return ray


def load(file: Path) -> LocalRay | None:
    """The head that `save` wrote down, if it still runs."""
    try:
        ray = msgspec.json.decode(file.read_bytes(), type=LocalRay)
    except (OSError, msgspec.MsgspecError):
        return None
    return ray if ray.alive else None


def save(ray: LocalRay, file: Path) -> None:
    """Write it down for a later command."""
    file.write_text(json.dumps(msgspec.to_builtins(ray), indent=1))


def _environment() -> dict[str, str]:
    """Ours, with the interpreter first on the path (jobs call `python`) and Ray's token auth off on loopback."""
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    env["RAY_AUTH_MODE"] = "disabled"
    return env


def _free_port(wanted: int = 0) -> int:
    with socket.socket() as probe:
        try:
            probe.bind((_HOST, wanted))
        except OSError:
            probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(_POLL_S)
        return probe.connect_ex((_HOST, port)) == 0
