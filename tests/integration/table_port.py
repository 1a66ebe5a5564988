"""A LoRA table that can die and come back, as workers and routers reach it."""

from __future__ import annotations

from typing import Any

from actors.adapters.admission import AdapterDesk, DeskSettings
from actors.lora_table import LoraTable


class TablePort:
    """Calls go to whichever table lives, and fail while none does. Lives on the fleet's loop."""

    def __init__(self, settings: DeskSettings) -> None:
        self._settings = settings
        self._is_dead = False
        self.table = LoraTable(AdapterDesk(settings))

    async def kill(self) -> None:
        """The table dies with all it knew; nobody is told."""
        self._is_dead = True
        await self.table.close()

    async def revive(self) -> None:
        """Another table, with nothing but what the former kept on disk."""
        self.table = LoraTable(AdapterDesk(self._settings))
        self._is_dead = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            table = self.table
            if self._is_dead:
                raise ConnectionError("the table is dead")
            answer = await getattr(table, method)(*args, **kwargs)
            if self.table is not table or self._is_dead:
                raise ConnectionError("the table died")
            return answer

        return call
