"""The LoRA table from afar: an actor handle with the table's own methods, for workers and routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from actors.adapters.entry import Assignment
from router.errors import RouterError
from router.ids import Incarnation, WorkerId
from router.reports import Holding, TableVersion, WorkerFacts


class RemoteTable:
    """See LoraTable for every method. Errors that a user can mend come as they were raised, all others as Ray's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def tell(
        self, worker_id: WorkerId, incarnation: Incarnation, holdings: list[Holding], facts: WorkerFacts | None
    ) -> TableVersion:
        """See LoraTable."""
        told: TableVersion = await self._call("tell", worker_id, incarnation, holdings, facts)
        return told

    async def wait_wanted(self, worker_id: WorkerId, epoch: str, revision: int, timeout_s: float) -> Assignment:
        """See LoraTable."""
        wanted: Assignment = await self._call("wait_wanted", worker_id, epoch, revision, timeout_s)
        return wanted

    async def wait_view(self, epoch: str, version: int, timeout_s: float) -> bytes:
        """See LoraTable."""
        return bytes(await self._call("wait_view", epoch, version, timeout_s))

    async def want(self, name: str, preferred: list[WorkerId], waiting: int, *, more: bool) -> None:
        """See LoraTable."""
        await self._call("want", name, preferred, waiting, more=more)

    async def use(self, counts: Mapping[str, int]) -> None:
        """See LoraTable."""
        await self._call("use", counts)

    async def load(self, name: str, source: str, **terms: Any) -> dict[str, Any]:
        """See LoraTable."""
        return dict(await self._call("load", name, source, **terms))

    async def unload(self, name: str, *, wait_s: float) -> dict[str, Any]:
        """See LoraTable."""
        return dict(await self._call("unload", name, wait_s=wait_s))

    async def reload(self, name: str, *, wait_s: float) -> dict[str, Any]:
        """See LoraTable."""
        return dict(await self._call("reload", name, wait_s=wait_s))

    async def pin(self, name: str, *, pinned: bool) -> dict[str, Any]:
        """See LoraTable."""
        return dict(await self._call("pin", name, pinned=pinned))

    async def status(self) -> dict[str, Any]:
        """See LoraTable."""
        return dict(await self._call("status"))

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await getattr(self._handle, method).remote(*args, **kwargs)
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, RouterError):
                raise exc.cause from None
            raise
