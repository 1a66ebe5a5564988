"""Auditing as a router does it: slowly in the background, at once when asked; what is found is told and mended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from router.core import RouterCore
from router.ids import SourceId
from router.net import metrics
from router.net.audit import Auditor, SourceAudit, Verdict

log = logging.getLogger(__name__)

_PROBES_ASKED: Final = 4
"""Prompts that each engine is asked when a user wants to know."""


class Auditing:
    """Lives on the core's loop."""

    def __init__(
        self, core: RouterCore, auditor: Auditor, *, record: Callable[..., None], resync: Callable[[SourceId], None]
    ) -> None:
        """`resync`: take a source anew from its worker."""
        self._core = core
        self._auditor = auditor
        self._record = record
        self._resync = resync

    async def run(self, interval_s: float) -> None:
        """One source after the other, until cancelled. An interval of 0 turns it off."""
        done: set[SourceId] = set()
        while interval_s:
            await asyncio.sleep(interval_s)
            sources = self._sources()
            waiting = [source for source in sources if source not in done]
            if not waiting:
                done, waiting = set(), sources
            if waiting:
                done.add(waiting[0])
                await self._audit(waiting[0], num_probes=1)

    async def audit_all(self) -> dict[str, Any]:
        """Every source now, as JSON values."""
        found = [await self._audit(source, num_probes=_PROBES_ASKED) for source in self._sources()]
        return {
            "clean": bool(found) and all(one.verdict is Verdict.CLEAN for one in found),
            "ghosts": sum(one.ghosts for one in found),
            "missing": sum(one.missing for one in found),
            "sources": [one.as_json() for one in found],
        }

    def _sources(self) -> list[SourceId]:
        return [source for record in self._core.workers.values() for source in record.sources]

    async def _audit(self, source: SourceId, *, num_probes: int) -> SourceAudit:
        found = await self._auditor.audit(source, num_probes=num_probes)
        labels = (source.worker_id, str(source.dp_rank))
        self._record(metrics.AUDITS, 1, *labels, found.verdict.value)
        for probe in found.probes:
            self._record(metrics.PROBES, 1, metrics.outcome(probe.predicted, probe.actual))
        if found.verdict is not Verdict.INCONCLUSIVE:
            self._record(metrics.GHOSTS, found.ghosts, *labels)
            self._record(metrics.MISSING, found.missing, *labels)
        if found.verdict is Verdict.DIRTY:
            log.error(
                "%s: %s: %d ghosts, %d missing of %d blocks, probes %s; taken anew from its worker",
                source, found.why, found.ghosts, found.missing, found.blocks, found.probes,
            )  # fmt: skip
            self._resync(source)
        return found
