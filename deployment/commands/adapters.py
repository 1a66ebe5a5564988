"""`adapters list|load|unload|reload|pin|unpin|where`: the catalogue of a running deployment, through its router."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Final

from deployment import client

_LOOK_S: Final = 0.5
_BUSY: Final = ("pending", "loading")


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked; exit status 1 where it failed on every worker."""
    url = arguments.url or client.status(arguments.name)["router"]["url"]
    fleet = _Fleet(url, arguments.api_key)
    if arguments.action == "list":
        found = fleet.get()
        print(json.dumps(found, indent=2) if arguments.json else _table(found))
        return 0
    if arguments.action == "where":
        one = fleet.find(arguments.adapter)
        print(json.dumps(one, indent=2) if arguments.json else _where(one))
        return 0
    found = _change(fleet, arguments)
    print(json.dumps(found, indent=2) if arguments.json else _outcome(arguments.action, found))
    return 0 if found.get("success", True) else 1


def _change(fleet: _Fleet, arguments: argparse.Namespace) -> dict[str, Any]:
    body: dict[str, Any] = {"lora_name": arguments.adapter}
    if arguments.action != "load":
        path = "/v1/unload_lora_adapter" if arguments.action == "unload" else f"/loray/adapters/{arguments.action}"
        return fleet.post(path, body, timeout_s=arguments.timeout)
    body |= {"lora_path": arguments.source, "pinned": arguments.pinned, "replicas": arguments.replicas, "wait_s": 0}
    if arguments.placement:
        body["placement"] = arguments.placement
    fleet.post("/v1/load_lora_adapter", body, timeout_s=arguments.timeout)
    return _watch(fleet, arguments.adapter, arguments.timeout, quiet=arguments.json)


def _watch(fleet: _Fleet, name: str, timeout_s: float, *, quiet: bool) -> dict[str, Any]:
    """Until every worker that is to hold it has loaded it or failed; says what changes."""
    until_s = time.monotonic() + timeout_s
    said: dict[str, str] = {}
    while True:
        workers = fleet.find(name)["workers"]
        for worker_id, one in workers.items():
            if said.get(worker_id) != one["state"]:
                said[worker_id] = one["state"]
                if not quiet:
                    print(f"{name} on {worker_id}: {one['state']} {one.get('error', '')}".rstrip(), flush=True)
        if workers and not any(one["state"] in _BUSY for one in workers.values()):
            break
        if time.monotonic() > until_s:
            raise RuntimeError(f"adapter {name!r} isn't loaded after {timeout_s:.0f} s; see 'adapters where'")
        time.sleep(_LOOK_S)
    success = any(one["state"] == "loaded" for one in workers.values())
    return {"name": name, "success": success, "results": workers}


class _Fleet:
    """A router's view of its adapters."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._api_key = api_key

    def get(self) -> dict[str, Any]:
        return client.get(f"{self._url}/loray/adapters", api_key=self._api_key)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        return client.post(self._url + path, body, api_key=self._api_key, timeout_s=timeout_s)

    def find(self, name: str) -> dict[str, Any]:
        adapters: list[dict[str, Any]] = self.get()["adapters"]
        for one in adapters:
            if one["name"] == name:
                return one
        listed = ", ".join(one["name"] for one in adapters) or "none"
        raise RuntimeError(f"adapter {name!r} isn't offered; offered: {listed}")


def _table(found: dict[str, Any]) -> str:
    lines = [f"{'adapter':24} {'placement':11} {'pinned':6} {'content':13} on"]
    for one in found["adapters"]:
        on = ", ".join(f"{w} ({s['state']})" for w, s in sorted(one["workers"].items())) or "-"
        pinned = "yes" if one["pinned"] else "no"
        lines.append(f"{one['name']:24} {one['placement']:11} {pinned:6} {one['content_id'][:12]:13} {on}")
    lines += [f"{name:24} leaving" for name in found["leaving"]]
    lines += [f"{name:24} rejected: {why}" for name, why in found["rejected"].items()]
    lines.append(f"{found['waiting']} wait for a place, {found['evictions']} were unloaded to make room")
    return "\n".join(lines)


def _where(one: dict[str, Any]) -> str:
    lines = [f"{one['name']}: {one['source']}, content {one['content_id'][:12]}, {one['placement']}"]
    for worker_id, state in sorted(one["workers"].items()):
        took = f" in {state['load_s']:.2f} s" if state.get("load_s") else ""
        lines.append(f"  {worker_id}: {state['state']}{took} {state.get('error', '')}".rstrip())
    return "\n".join(lines if one["workers"] else [*lines, "  nowhere; the next request loads it"])


def _outcome(action: str, found: dict[str, Any]) -> str:
    each = ", ".join(f"{w} {one['state']}" for w, one in found.get("results", {}).items()) or "no worker"
    changed = "" if "changed" not in found else ", other content" if found["changed"] else ", same content"
    return f"{action} {found['name']}: {each}{changed}"
