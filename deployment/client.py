"""Finding a running deployment from a command: its controller by Ray, its router by HTTP."""

from __future__ import annotations

import json
import logging
import urllib.error
import urllib.request
from typing import Any, Final

import ray
from ray.util import list_named_actors

from deployment.names import NAMESPACE, actor_name

_CALL_S: Final = 30.0


class NotRunningError(RuntimeError):
    """There is no such deployment; the message says what is there."""


def join_cluster() -> None:
    """Join the Ray cluster that runs here. Raises NotRunningError."""
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as exc:
        raise NotRunningError("no Ray cluster runs here (or set RAY_ADDRESS); start a deployment with 'up'") from exc


def deployments() -> list[str]:
    """Names of the deployments on this cluster."""
    prefix, suffix = f"{NAMESPACE}/", "/controller"
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    return sorted(n[len(prefix) : -len(suffix)] for n in names if n.startswith(prefix) and n.endswith(suffix))


def controller(name: str | None) -> Any:
    """Controller of a deployment; without a name, of the only one. Raises NotRunningError."""
    join_cluster()
    running = deployments()
    if name is None:
        if len(running) != 1:
            listed = ", ".join(running) or "none"
            raise NotRunningError(f"which deployment? Running: {listed}. Say --name")
        name = running[0]
    if name not in running:
        raise NotRunningError(f"deployment {name!r} is not running; running: {', '.join(running) or 'none'}")
    return ray.get_actor(actor_name(name, "controller"), namespace=NAMESPACE)


def status(name: str | None) -> dict[str, Any]:
    """The deployment's status. Raises NotRunningError."""
    found: dict[str, Any] = ray.get(controller(name).status.remote(), timeout=_CALL_S)
    return found


class RouterError(RuntimeError):
    """The router refused; the message is its own."""


def post(url: str, body: dict[str, Any], *, api_key: str | None = None, timeout_s: float = _CALL_S) -> dict[str, Any]:
    """POST JSON to a router. Raises RouterError."""
    return _ask(url, json.dumps(body).encode(), api_key, timeout_s)


def get(url: str, *, api_key: str | None = None, timeout_s: float = _CALL_S) -> dict[str, Any]:
    """GET JSON from a router. Raises RouterError."""
    return _ask(url, None, api_key, timeout_s)


def _ask(url: str, data: bytes | None, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as exc:
        raise RouterError(f"HTTP {exc.code}: {exc.read().decode(errors='replace')}") from exc
    except OSError as exc:
        raise RouterError(f"{url}: {exc}") from exc
