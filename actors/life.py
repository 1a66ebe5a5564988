"""One incarnation of a worker: an engine process with its client, its mirror, and what it holds."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from actors.adapters.entry import Wanted
from actors.adapters.loader import AdapterLoader
from actors.engine.child import EngineProcess
from actors.engine.client import EngineClient, EngineError, EngineFacts
from actors.engine.identity import AdapterFilesError, adapter_files, content_id, lora_id
from actors.engine.spec import EngineSpec
from actors.mirror import Mirror
from actors.probe import attest_engine
from router.attestation import HashForm
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.reports import AdapterState, Holding, RankLoad, RankReport, WorkerFacts, WorkerReport, WorkerState

log = logging.getLogger(__name__)

_POLL_S: Final = 0.25
_HEAL_S: Final = 5.0
_LOAD_S: Final = 1.0


class EngineLife:
    """`start`, then `wait` until it ends, then `close`. `kill` may come from anywhere at any time."""

    def __init__(self, worker_id: WorkerId) -> None:
        self.incarnation = Incarnation(uuid.uuid4().hex[:12])
        #: wakes whoever tells the table
        self.changed = asyncio.Event()
        #: adapters that the engine was started with; the others are the loader's
        self._fixed: list[Holding] = []
        self._loader: AdapterLoader | None = None
        self._facts: WorkerFacts | None = None
        self.client: EngineClient | None = None
        self._report = WorkerReport(worker_id=worker_id, incarnation=self.incarnation, state=WorkerState.STARTING)
        self._process: EngineProcess | None = None
        self._mirror: Mirror | None = None
        self._killed = False
        #: what the engine said of its load last, by its own ranks
        self._loads: dict[int, RankLoad] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the server, None before the start."""
        return self._process.pid if self._process else None

    @property
    def holdings(self) -> list[Holding]:
        """What the engine's name table holds; empty until it serves."""
        return self._fixed if self._loader is None else self._loader.holdings

    @property
    def facts(self) -> WorkerFacts | None:
        """What it can hold; None until it serves."""
        return self._facts

    def assign(self, wanted: Sequence[Wanted]) -> None:
        """What the engine is to hold; heard once it serves, and only by one that can load at run time."""
        if self._loader is not None:
            self._loader.assign(wanted)

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
            msgspec.structs.replace(rank, last_seq=mirror.last_seq(rank.dp_rank), load=self._loads.get(i))
            for i, rank in enumerate(self._report.ranks)
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
        if spec.dp_size > 1:
            self._fixed = await asyncio.to_thread(self._read_holdings, spec)
        ranks = _ranks(spec)
        form = HashForm(facts.page_size, bigram=facts.bigram, dynamo=spec.kv_events.format == "dynamo")
        sources = [SourceId(self._report.worker_id, self.incarnation, rank.dp_rank) for rank in ranks]
        self._mirror = Mirror(sources, ranks, form)
        fault = await attest_engine(client, self._mirror, form)
        if fault:
            log.error("%s: %s; it serves, but nothing is predicted for it", self._report.worker_id, fault)
        if spec.dp_size == 1:
            self._loader = AdapterLoader(
                self._report.worker_id, self.incarnation, client, spec.lora.cache(), on_change=self.changed.set
            )
        self._facts = spec.lora.facts()
        self._serve(spec, url, ranks, facts, snapshot_endpoint, fault)
        self.changed.set()

    async def wait(self) -> None:
        """Until the engine ends, which is an error: raises EngineError with its last lines."""
        assert self._process is not None
        helpers = [asyncio.ensure_future(work) for work in (self._heal(), self._watch_load())]
        if self._loader is not None:
            helpers.append(asyncio.ensure_future(self._keep_loading(self._loader)))
        try:
            code = await self._process.wait()
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
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
        self._fixed, self._loader, self._facts = [], None, None
        self.changed.set()
        if mirror is not None:
            await mirror.close()
        if client is not None:
            await client.close()

    async def _keep_loading(self, loader: AdapterLoader) -> None:
        try:
            await loader.run()
        except TimeoutError as exc:
            log.error("worker %s: %s; its engine is ended", self._report.worker_id, exc)
            await self.kill()
        except Exception:  # a fault of ours: another life starts from what the table says
            log.exception("worker %s: its adapters can't be looked after; its engine is ended", self._report.worker_id)
            await self.kill()

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

    async def _watch_load(self) -> None:
        """Ask the engine for its load, for the heartbeat."""
        while self.client is not None:
            try:
                async with asyncio.timeout(_LOAD_S):  # one that stands still has no load that is known
                    self._loads = await self.client.loads()
            except (EngineError, TimeoutError) as exc:
                self._loads = {}
                log.info("%s: no load report: %s: %s", self._report.worker_id, type(exc).__name__, exc)
            await asyncio.sleep(_LOAD_S)

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
        return [self._holding(name, one.path) for name, one in spec.lora.configured.items()]

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
    for name, one in spec.lora.configured.items() if spec.dp_size > 1 else ():
        try:
            adapter_files(Path(one.path))
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
