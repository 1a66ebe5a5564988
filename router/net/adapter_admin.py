"""HTTP surface for adapters: load, unload, reload, pin, list. What is done, the LoRA table does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from aiohttp import web

from router.errors import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Wait = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class AdapterAdmin(Protocol):
    """The LoRA table as its users see it, from afar. Raises RouterError for what a user can mend."""

    async def load(self, name: str, source: str, **terms: Any) -> dict[str, Any]:
        """See LoraTable."""

    async def unload(self, name: str, *, wait_s: float) -> dict[str, Any]:
        """See LoraTable."""

    async def reload(self, name: str, *, wait_s: float) -> dict[str, Any]:
        """See LoraTable."""

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """See LoraTable."""

    async def status(self) -> dict[str, Any]:
        """See LoraTable."""


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """As SGLang's and vLLM's own; unknown fields are let pass, as they do."""

    lora_name: Name
    lora_path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    pinned: bool = False
    placement: Literal["everywhere", "replicas", "on_demand"] | None = None
    replicas: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    wait_s: Wait = 600.0
    """Answer after so long at the latest; loading goes on."""


class NameBody(msgspec.Struct, frozen=True, kw_only=True):
    """Which adapter."""

    lora_name: Name
    wait_s: Wait = 600.0


class AdapterRoutes:
    """Handlers, to be added to an application."""

    def __init__(self, admin: AdapterAdmin) -> None:
        self._admin = admin

    def add_to(self, app: web.Application) -> None:
        """Register all paths."""
        for prefix in ("", "/v1"):
            app.router.add_post(f"{prefix}/load_lora_adapter", self._load)
            app.router.add_post(f"{prefix}/unload_lora_adapter", self._unload)
        app.router.add_post("/loray/adapters/reload", self._reload)
        app.router.add_post("/loray/adapters/pin", self._pin)
        app.router.add_post("/loray/adapters/unpin", self._unpin)
        app.router.add_get("/loray/adapters", self._list)

    async def _load(self, request: web.Request) -> web.Response:
        body = await _read(request, LoadBody)
        found = await self._admin.load(
            body.lora_name,
            body.lora_path,
            placement=body.placement,
            replicas=body.replicas,
            pinned=body.pinned,
            wait_s=body.wait_s,
        )
        return _answer(found, pending_is_fine=not body.wait_s)

    async def _unload(self, request: web.Request) -> web.Response:
        body = await _read(request, NameBody)
        return _answer(await self._admin.unload(body.lora_name, wait_s=body.wait_s), pending_is_fine=not body.wait_s)

    async def _reload(self, request: web.Request) -> web.Response:
        body = await _read(request, NameBody)
        return _answer(await self._admin.reload(body.lora_name, wait_s=body.wait_s), pending_is_fine=True)

    async def _pin(self, request: web.Request) -> web.Response:
        body = await _read(request, NameBody)
        return web.json_response(await self._admin.pin(body.lora_name, pinned=True))

    async def _unpin(self, request: web.Request) -> web.Response:
        body = await _read(request, NameBody)
        return web.json_response(await self._admin.pin(body.lora_name, pinned=False))

    async def _list(self, _request: web.Request) -> web.Response:
        return web.json_response(listing(await self._admin.status()))


def listing(status: Mapping[str, Any]) -> dict[str, Any]:
    """The table's status as a list of adapters, each with what every worker makes of it."""
    states: dict[str, dict[str, Any]] = {}
    for row in status["holdings"]:
        one = {"state": row["state"], "load_s": row["load_s"], **({"error": row["error"]} if row["error"] else {})}
        states.setdefault(row["name"], {})[row["worker_id"]] = one
    for worker_id, names in status["wanted"].items():
        for name in names:
            states.setdefault(name, {}).setdefault(worker_id, {"state": "pending"})
    known = {entry["name"] for entry in status["catalogue"]}
    return {
        "version": status["version"],
        "adapters": [{**entry, "workers": states.get(entry["name"], {})} for entry in status["catalogue"]],
        "leaving": sorted(states.keys() - known),
        "rejected": status["rejected"],
        "waiting": status["waiting"],
        "evictions": status["evictions"],
    }


async def _read(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise InvalidRequest(f"unreadable body: {exc}") from exc


def _answer(found: dict[str, Any], *, pending_is_fine: bool) -> web.Response:
    """200 where it succeeded on any worker, 502 where it failed on all."""
    return web.json_response(found, status=200 if found["success"] or pending_is_fine else 502)
