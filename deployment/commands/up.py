"""`up CONFIG`: run a deployment until it is told to stop. The job is the deployment: it ends with this process."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import ray

from deployment import cluster
from deployment.client import deployments
from deployment.config import Config, ConfigError
from deployment.controller import Controller
from deployment.names import actor_name

_POLL_S: Final = 0.5
_STOP_S: Final = 20.0
"""How long a signal may take to bring the deployment down; what is left then, Ray ends."""
_DOWN_S: Final = 60.0


def run(arguments: argparse.Namespace) -> int:
    """Bring it up, show its news, take it down on SIGTERM or SIGINT."""
    config = Config.load(Path(arguments.config))
    info = cluster.connect()
    if config.name in deployments():
        raise ConfigError(f"deployment {config.name!r} is running already; use 'apply', or another name")
    if config.kv_events.format == "default":
        _say("kv_events.format is 'default': cached tokens are predicted for the base model only, not for adapters")
    dashboard = info.get("webui_url")
    if dashboard:
        _say(f"dashboard: http://{dashboard}")
    options = {"name": actor_name(config.name, "controller"), "num_cpus": 0, "max_concurrency": 100}
    controller = ray.remote(Controller).options(**options).remote(config)
    return _follow(controller, controller.run.remote())


def _follow(controller: Any, ended: Any) -> int:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    shown = 0
    deadline_s: float | None = None
    while not ray.wait([ended], timeout=_POLL_S)[0]:
        if stop.is_set() and deadline_s is None:
            deadline_s = time.monotonic() + _STOP_S
            controller.down.remote()
        if deadline_s is not None and time.monotonic() > deadline_s:
            _say("still not down: leaving the rest to Ray")
            return 1
        shown += _show(controller, shown)
    _show(controller, shown)
    try:
        ray.get(ended)
    except ray.exceptions.RayTaskError as exc:
        print(f"error: {exc.cause}", file=sys.stderr)
        return 1
    except ray.exceptions.RayActorError as exc:
        print(f"error: the controller died: {exc}", file=sys.stderr)
        return 1
    return 0


def _show(controller: Any, since: int) -> int:
    try:
        lines: list[str] = ray.get(controller.news.remote(since), timeout=_STOP_S)
    except ray.exceptions.RayError:
        return 0
    for line in lines:
        _say(line)
    return len(lines)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def apply(arguments: argparse.Namespace) -> int:
    """`apply CONFIG`: change the running deployment of that name."""
    from deployment.client import controller, status

    config = Config.load(Path(arguments.config))
    try:
        ray.get(controller(config.name).apply.remote(config))
    except ray.exceptions.RayTaskError as exc:
        raise ConfigError(str(exc.cause)) from exc
    if arguments.wait:
        _wait(config.name, config.workers.count, arguments.wait)
    print(json.dumps({"state": status(config.name)["state"], "workers": config.workers.count}))
    return 0


def down(arguments: argparse.Namespace) -> int:
    """`down`: end the running deployment, and wait until it is gone."""
    from deployment.client import controller

    handle = controller(arguments.name)
    name = ray.get(handle.status.remote())["name"]
    ray.get(handle.down.remote())
    until_s = time.monotonic() + _DOWN_S
    while name in deployments():
        if time.monotonic() > until_s:
            print(f"error: deployment {name!r} is still there after {_DOWN_S:.0f} s", file=sys.stderr)
            return 1
        time.sleep(_POLL_S)
    print(f"deployment {name!r} is down")
    return 0


def _wait(name: str, count: int, timeout_s: float) -> None:
    from deployment.client import status

    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        found = status(name)
        if found["state"] == "ready" and len(found["workers"]) == count:
            return
        time.sleep(_POLL_S)
    raise TimeoutError(f"deployment {name!r} did not reach {count} workers within {timeout_s:.0f} s")
