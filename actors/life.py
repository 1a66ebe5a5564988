"""One incarnation of a worker: an engine process with its client, its mirror, and what it holds."""

from __future__ import annotations

import asyncio
import logging
import uuid
from pathlib import Path
from typing import Final

import msgspec

from actors.engine.child import EngineProcess
from actors.engine.client import EngineClient, EngineError, EngineFacts
from actors.engine.identity import AdapterFilesError, adapter_files, content_id, lora_id
from actors.engine.spec import EngineSpec
from actors.mirror import Mirror
from actors.probe import attest_engine
from router.attestation import HashForm
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.reports import AdapterState, Holding, RankReport, WorkerReport, WorkerState

log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_HEAL_S: Final = 5.0


class EngineLife:
    """`start`, then `wait` until it ends, then `close`. `kill` may come from anywhere at any time."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.incarnation = Incarnation(uuid.uuid4().hex[:12])
        #: what the engine's name table holds; empty until it serves
        self.holdings: list[Holding] = []
        self.client: EngineClient | None = None
        self._report = WorkerReport(worker_id=worker_id, incarnation=self.incarnation, state=WorkerState.STARTING)
        self._process: EngineProcess | None = None
        self._mirror: Mirror | None = None
        self._killed = False

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before the start."""
        return self._process.pid if self._process else None

    @property
    def mirror(self) -> Mirror | None:
        """None until the engine serves."""
        return self._mirror

    def report(self) -> WorkerReport:
        """The heartbeat as of now."""
        mirror = self._mirror
        if mirror is None or not self._report.ranks:
            return self._report
        ranks = tuple(
            msgspec.structs.replace(rank, last_seq=mirror.last_seq(rank.dp_rank)) for rank in self._report.ranks
        )
        return msgspec.structs.replace(self._report, ranks=ranks)

    def drain(self) -> None:
        """Ask for no more requests."""
        if self._report.state is WorkerState.READY:
            self._report = msgspec.structs.replace(self._report, state=WorkerState.DRAINING)

    async def start(self, spec: EngineSpec, *, api_key: str, folder: Path, snapshot_endpoint: str) -> None:
        """Start the engine and wait until it serves. Raises EngineError with its last lines, ValueError, OSError."""
        _check_files(spec)
        process = self._process = EngineProcess(spec, api_key=api_key, folder=folder)
        await process.start()
        url = f"http://{spec.host}:{spec.port}"
        client = self.client = EngineClient(url, api_key)
        while self._killed or not await client.is_ready():
            if self._killed or process.exit_code is not None:
                await self.kill()
                raise EngineError(f"engine ended with {process.exit_code} at start:\n{process.tail}")
            await asyncio.sleep(_POLL_S)
        facts = await client.facts()
        self.holdings = await asyncio.to_thread(self._read_holdings, spec)
        ranks = _ranks(spec)
        form = HashForm(facts.page_size, bigram=facts.bigram, dynamo=spec.kv_events.format == "dynamo")
        sources = [SourceId(self._report.worker_id, self.incarnation, rank.dp_rank) for rank in ranks]
        self._mirror = Mirror(sources, ranks, form)
        fault = await attest_engine(client, self._mirror, form)
        if fault:
            log.error("%s: %s; it serves, but nothing is predicted for it", self._report.worker_id, fault)
        self._serve(spec, url, ranks, facts, snapshot_endpoint, fault)

    async def wait(self) -> None:
        """Until the engine ends, which is an error: raises EngineError with its last lines."""
        assert self._process is not None
        healing = asyncio.ensure_future(self._heal())
        try:
            code = await self._process.wait()
        finally:
            healing.cancel()
        raise EngineError(f"engine ended with {code} while serving:\n{self._process.tail}")

    async def kill(self) -> None:
        """End the engine; `start` or `wait` then raise. Idempotent."""
        self._killed = True
        if self._process is not None:
            await self._process.stop()

    async def close(self) -> None:
        """End whatever is left. Idempotent."""
        await self.kill()
        mirror, self._mirror = self._mirror, None
        client, self.client = self.client, None
        self.holdings = []
        if mirror is not None:
            await mirror.close()
        if client is not None:
            await client.close()

    async def _heal(self) -> None:
        """Empty the engine's cache where the mirror has missed what nobody can tell it any more."""
        while True:
            await asyncio.sleep(_HEAL_S)
            if self._mirror is None or self.client is None or not self._mirror.has_hole():
                continue
            try:
                await self.client.flush_cache(timeout_s=_HEAL_S)
                log.warning("%s: events were lost for good; the engine's cache was flushed", self._report.worker_id)
            except EngineError as exc:
                log.warning("%s: events were lost for good, to be flushed when idle: %s", self._report.worker_id, exc)

    def _serve(
        self,
        spec: EngineSpec,
        url: str,
        ranks: list[RankReport],
        facts: EngineFacts,
        snapshot_endpoint: str,
        fault: str,
    ) -> None:
        self._report = msgspec.structs.replace(
            self._report,
            state=WorkerState.READY,
            url=url,
            ranks=tuple(ranks),
            page_size=facts.page_size,
            context_length=facts.context_length,
            max_total_tokens=facts.max_total_tokens,
            max_loras_per_batch=spec.lora.max_loras_per_batch,
            dynamo_format=spec.kv_events.format == "dynamo",
            bigram=facts.bigram,
            snapshot_endpoint=snapshot_endpoint,
            fault=fault,
        )

    def _read_holdings(self, spec: EngineSpec) -> list[Holding]:
        """Reads all adapters' files: seconds where there are many."""
        return [self._holding(name, path) for name, path in spec.lora.adapters.items()]

    def _holding(self, name: str, path: str) -> Holding:
        content = content_id(Path(path))
        return Holding(
            worker_id=self._report.worker_id,
            incarnation=self.incarnation,
            lora_id=lora_id(name, content),
            name=name,
            content_id=content,
            state=AdapterState.LOADED,
        )


def _check_files(spec: EngineSpec) -> None:
    """Raise ValueError for what would take SGLang half a minute to find out."""
    model = Path(spec.model.path)
    if model.is_absolute() and not (model / "config.json").is_file():
        raise ValueError(f"model folder {model} has no config.json on this node; correct model.path")
    for name, path in spec.lora.adapters.items():
        try:
            adapter_files(Path(path))
        except AdapterFilesError as exc:
            raise ValueError(f"lora.adapters.{name}: {exc}") from exc


def _ranks(spec: EngineSpec) -> list[RankReport]:
    """Where each rank publishes."""
    return [
        RankReport(
            dp_rank=DpRank(spec.first_dp_rank + i),
            endpoint=f"tcp://{spec.host}:{spec.event_port + i}",
            replay_endpoint=f"tcp://{spec.host}:{spec.replay_port + i}",
        )
        for i in range(spec.dp_size)
    ]
