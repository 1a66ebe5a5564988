"""Adapters as users handle them over HTTP, and as engines list them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from deployment.assets.tiny import make_adapter
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.local_fleet import ENGINE_KEY, SERVED, LocalFleet


def on_shelf(fleet: LocalFleet, shelf: Path, name: str, *, seed: int) -> Path:
    """A new adapter's folder."""
    return make_adapter(fleet.model, shelf / name, seed=seed)


def load(client: httpx.Client, name: str, path: Path | str, **terms: Any) -> dict[str, Any]:
    """Load and expect success."""
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **terms})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def unload(client: httpx.Client, name: str) -> dict[str, Any]:
    """Unload and expect success."""
    answer = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def reload(client: httpx.Client, name: str) -> dict[str, Any]:
    """Read again and expect success."""
    answer = client.post("/loray/adapters/reload", json={"lora_name": name})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def listed(client: httpx.Client) -> dict[str, dict[str, Any]]:
    """The catalogue, by name."""
    return {one["name"]: one for one in client.get("/loray/adapters").json()["adapters"]}


def known_to_router(fleet: LocalFleet, name: str, *workers: str) -> None:
    """Until the router knows these workers as the adapter's holders, and no others."""
    poll(
        lambda: fleet.call(
            lambda: {w for w, record in fleet.core.workers.items() if name in record.adapters} == set(workers)
        ),
        what=f"{name} is on {workers}",
    )


def engines_own_lists(fleet: LocalFleet) -> dict[str, set[str]]:
    """What each engine says it has loaded."""
    found = {}
    for worker_id in fleet.workers:
        url = fleet.engine_url(worker_id)
        cards = httpx.get(
            f"{url}/v1/models", headers={"Authorization": f"Bearer {ENGINE_KEY}"}, timeout=SETTLE_S
        ).json()["data"]
        found[str(worker_id)] = {card["id"] for card in cards} - {SERVED}
    return found
