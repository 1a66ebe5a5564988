"""A whole fleet without Ray: real Worker, LoraTable and Router objects on one event loop in a background thread.

Tests drive it over HTTP as a client would, and may look inside on its loop (`run`, `call`).
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import msgspec
import psutil
import zmq

from actors.adapters.admission import DeskSettings
from actors.adapters.entry import AdapterConfig, Placement
from actors.engine.client import EngineClient
from actors.engine.spec import KvEventsConfig, LoraConfig, ModelConfig
from actors.lora_table import LoraTable
from actors.router import Router, RouterSettings
from actors.worker import Worker, WorkerSettings
from router.config import RouterConfig
from router.core import RouterCore
from router.cost import CostWeights
from router.ids import SourceId, WorkerId
from router.ingest import SourceState
from router.reports import RankReport, WorkerState
from tests.integration.background_loop import SETTLE_S, BackgroundLoop, T
from tests.integration.table_port import TablePort
from tests.ports import free_port

SERVED: Final = "tiny-llama"
ADAPTERS: Final = ("adapter-a", "adapter-b")
ENGINE_KEY: Final = "key-of-the-engines"
PAGE: Final = 16
CONTEXT: Final = 1024
CACHE_TOKENS: Final = 2048
BOOT_S: Final = 300.0
"""An engine needs 20 s alone, minutes on a machine that is busy otherwise."""


class LocalFleet(BackgroundLoop):
    """Workers w<first_index>, ..., one table, one router (r0) and any that `add_router` brings."""

    def __init__(
        self,
        model: Path,
        *,
        num_workers: int,
        first_index: int = 0,
        dp_size: int = 1,
        replay_buffer: int = 10_000,
        max_body_mb: int = 1,
        adapters: Mapping[str, Path] | None = None,
        placement: Placement = Placement.EVERYWHERE,
        max_loaded: int | None = None,
        roots: Sequence[Path] = (),
        device: str = "cpu",
        emulated: str | None = None,
        cache_tokens: int = CACHE_TOKENS,
        context: int = CONTEXT,
        max_rank: int = 16,
    ) -> None:
        """`adapters`: name -> folder; those of the tiny model by default. `placement`: of those, and by default."""
        super().__init__()
        self.model = model
        self._adapters = dict(adapters or {name: model / "adapters" / name for name in ADAPTERS})
        self._placement = placement
        self._folder = tempfile.TemporaryDirectory(prefix="loray-test-")
        lora = LoraConfig(
            adapters={
                name: AdapterConfig(path=str(path), placement=placement) for name, path in self._adapters.items()
            },
            max_loras_per_batch=4,
            max_rank=max_rank,
            max_loaded=max_loaded,
            roots=tuple(map(str, roots)),
            cache_dir=self._folder.name + "/adapters",
        )
        self.desk = DeskSettings(
            served_name=SERVED,
            model_path=str(model),
            configured=lora.configured,
            default_placement=placement,
            max_rank=lora.max_rank,
            target_modules=lora.target_modules,
            roots=lora.roots,
            cache_dir=lora.cache_dir,
            cache_gb=lora.cache_gb,
            state_file=self._folder.name + "/catalogue.json",
            run_id="r1",
            fixed=dp_size > 1,
        )
        self._max_body_mb = max_body_mb
        cores = sorted(os.sched_getaffinity(0))
        self._settings = [
            WorkerSettings(
                worker_id=WorkerId(f"w{index}"),
                index=index,
                host="127.0.0.1",
                device=device,
                model=ModelConfig(path=str(model), served_name=SERVED, dtype="bfloat16", context_length=context),
                kv_events=KvEventsConfig(replay_buffer=replay_buffer),
                lora=lora,
                dp_size=dp_size,
                cpu_cores=tuple(cores[(index * dp_size + i) % len(cores)] for i in range(dp_size)),
                extra_args=tuple(
                    f"--mem-fraction-static 0.2 --max-total-tokens {cache_tokens} --page-size {PAGE}".split()
                ),
                emulated=emulated,
                api_key=ENGINE_KEY,
            )
            for index in range(first_index, first_index + num_workers)
        ]
        self.workers: dict[WorkerId, Worker] = {}
        self.port: TablePort
        self.router: Router
        self.url = ""
        #: all that listen to the fleet now
        self._routers: list[Router] = []
        self._context = zmq.Context()
        #: replay sockets of engines, by endpoint
        self._replays: dict[str, zmq.Socket[bytes]] = {}
        self._lives: list[Future[None]] = []
        self._before: set[int] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Boot everything; returns once all sources are exact and all adapters are known everywhere."""
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.start_loop()
        try:
            self.run(self._make())
            self.wait_whole(within_s=BOOT_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything; fails if a process is left."""
        engines = self.processes()
        try:
            self.run(self._unmake(), within_s=120)
        except TimeoutError:
            self.call(lambda: [task.print_stack() for task in asyncio.all_tasks()])
            raise
        finally:
            self._context.destroy(linger=0)
            self._folder.cleanup()
            self.stop_loop()
            _, alive = psutil.wait_procs([*engines, *self.processes()], timeout=20)
            left = [" ".join(_command(process)) for process in alive]
            for process in alive:
                process.kill()
        assert not left, f"processes left behind: {left}"
        for life in self._lives:
            assert life.done(), "a worker's run didn't return"
            life.result()

    def processes(self) -> list[psutil.Process]:
        """Everything that was started since `start`."""
        return [p for p in psutil.Process().children(recursive=True) if p.pid not in self._before]

    async def _make(self) -> None:
        self.port = TablePort(self.desk)
        for settings in self._settings:
            worker = Worker(settings, self.port)
            self.workers[settings.worker_id] = worker
            self._lives.append(self.spawn(worker.run()))
        self.router, self.url = await self._make_router("r0")

    def router_settings(self, router_id: str) -> RouterSettings:
        """Settings of one more router, on a port of its own; audits when asked only."""
        weights = CostWeights(prefill_tokens_per_s=2000)
        return RouterSettings(
            router_id=router_id,
            config=RouterConfig(
                port=free_port(),
                weights=weights,
                max_body_mb=self._max_body_mb,
                request_timeout_s=120,
                audit_interval_s=0,
            ),
            served_name=SERVED,
            model_path=str(self.model),
            api_key=ENGINE_KEY,
        )

    def heartbeats(self) -> dict[WorkerId, str]:
        """Where each worker is heard."""
        return {worker_id: worker.heartbeat_endpoint for worker_id, worker in self.workers.items()}

    async def _make_router(
        self, router_id: str, heartbeats: Mapping[WorkerId, str] | None = None
    ) -> tuple[Router, str]:
        settings = self.router_settings(router_id)
        router = Router(settings, self.port)
        await router.start()
        self._routers.append(router)
        await router.follow(heartbeats or self.heartbeats())
        return router, f"http://127.0.0.1:{settings.config.port}"

    async def _unmake(self) -> None:
        if hasattr(self, "router"):
            await self.router.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await self.port.kill()

    @contextmanager
    def another_router(self, heartbeats: Mapping[WorkerId, str] | None = None) -> Iterator[tuple[Router, str]]:
        """A router that joins now: itself and its URL. `heartbeats`: where it hears workers, if not at themselves."""
        router, url = self.run(self._make_router("r1", heartbeats))
        try:
            yield router, url
        finally:
            self._routers.remove(router)
            self.run(router.stop())

    @property
    def table(self) -> LoraTable:
        """The one that lives now."""
        return self.port.table

    # -- looking inside; on the loop -----------------------------------------------------------------------------

    @property
    def core(self) -> RouterCore:
        """The core of the first router."""
        return self.router._core

    def check(self, router: Router | None = None) -> None:
        """The core's invariants, with nothing booked."""

        def checked() -> None:
            core = (router or self.router)._core
            core.check()
            assert core.load.running.sum() == 0, core.load.running
            assert core.load.queued_tokens.sum() == 0, core.load.queued_tokens

        self.call(checked)

    def sources(self) -> list[SourceId]:
        """All sources that the first router knows."""
        return self.call(self.sources_now)

    def sources_now(self) -> list[SourceId]:
        """The same, on the loop."""
        return [source for record in self.core.workers.values() for source in record.sources]

    def ranks(self) -> dict[SourceId, RankReport]:
        """Endpoints of all sources."""
        return self.call(
            lambda: {
                source: rank
                for record in self.core.workers.values()
                for source, rank in zip(record.sources, record.report.ranks, strict=True)
            }
        )

    def wait_whole(self, router: Router | None = None, *, within_s: float = SETTLE_S) -> None:
        """Until every worker is ready, every source exact, every adapter known and loaded, as a router sees it."""
        core = (router or self.router)._core

        def whole() -> bool:
            for life in self._lives:
                if life.done():
                    life.result()
            records = list(core.workers.values())
            return (
                len(records) == len(self.workers)
                and (router or self.router)._ingress.trusted_tokenizer is not None
                and set(self._adapters) <= set(core.table.names)
                and all(record.report.state is WorkerState.READY and record.sources for record in records)
                and all(core.ingest.state(s) is SourceState.EXACT for record in records for s in record.sources)
                and (
                    self._placement is not Placement.EVERYWHERE
                    or all(core.loaded(record, name) is not None for record in records for name in self._adapters)
                )
            )

        try:
            self.wait(whole, within_s=within_s, what="fleet whole")
        except AssertionError as exc:
            states = self.call(lambda: [msgspec.to_builtins(worker.status()) for worker in self.workers.values()])
            raise AssertionError(f"{exc}: {states}") from exc

    def settle(self) -> None:
        """Until nothing runs and all that engines have published is applied."""
        self.wait(lambda: int(self.core.load.running.sum()) == 0, what="nothing booked")
        self.catch_up()

    def catch_up(self) -> None:
        """Until every router has applied all that engines have published so far.

        Events are sent before the answer that they belong to, but on a connection of their own: on a machine with more
        threads than cores they can arrive after it. The engines' replay rings tell what there is.
        """
        ranks = self.ranks()
        asked = {source: self._ask_replay(source, rank) for source, rank in ranks.items()}
        for source, replay in asked.items():
            published = _last_seq(replay)
            for router in self._routers:
                ingest = router._core.ingest
                self.wait(
                    lambda ingest=ingest, source=source, published=published: (
                        source not in ingest or ingest.cursor(source).next_seq > published
                    ),
                    what=f"{source} applied up to {published}",
                )

    def _ask_replay(self, source: SourceId, rank: RankReport) -> zmq.Socket[bytes]:
        endpoint = rank.replay_endpoint
        assert endpoint is not None
        if endpoint not in self._replays:
            self._replays[endpoint] = self._context.socket(zmq.DEALER)
            self._replays[endpoint].connect(endpoint)
        next_seq = self.call(lambda: self.core.ingest.cursor(source).next_seq)
        self._replays[endpoint].send_multipart([b"", next_seq.to_bytes(8, "big")])
        return self._replays[endpoint]

    def client(self, url: str = "") -> httpx.Client:
        """A client of a router that asks only once the routers know the outcome of its last request. To be closed."""
        behind: list[bool] = []

        def wait(_request: httpx.Request) -> None:
            if behind:
                behind.clear()
                self.catch_up()

        def note(response: httpx.Response) -> None:
            if "x-loray-worker" in response.headers:
                behind.append(True)

        hooks: dict[str, list[Callable[..., None]]] = {"request": [wait], "response": [note]}
        return httpx.Client(base_url=url or self.url, timeout=SETTLE_S, event_hooks=hooks)

    # -- engines -------------------------------------------------------------------------------------------------

    def engine_url(self, worker_id: str) -> str:
        """Where the worker's engine listens in its current life."""
        return self.call(lambda: self.workers[WorkerId(worker_id)].report().url)

    def engine_pid(self, worker_id: str) -> int:
        """Process id of the worker's engine."""
        pid = self.call(lambda: self.workers[WorkerId(worker_id)].status()["engine_pid"])
        assert isinstance(pid, int)
        return pid

    def engine(self, worker_id: str) -> httpx.Client:
        """A client of one engine, past the router. To be closed."""
        return httpx.Client(
            base_url=self.engine_url(worker_id), headers={"Authorization": f"Bearer {ENGINE_KEY}"}, timeout=SETTLE_S
        )

    def with_engine_client(self, worker_id: str, ask: Callable[[EngineClient], Awaitable[T]]) -> T:
        """Result of `ask` with the client that a worker uses on its own engine."""
        url = self.engine_url(worker_id)

        async def asking() -> T:
            client = EngineClient(url, ENGINE_KEY)
            try:
                return await ask(client)
            finally:
                await client.close()

        return self.run(asking())

    def running(self, worker_id: str) -> int:
        """Requests that the worker's engine runs or queues, as the engine says."""
        with self.engine(worker_id) as engine:
            answer = engine.get("/v1/loads")
        assert answer.status_code == 200, answer.text
        loads: list[Mapping[str, int]] = answer.json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def _last_seq(socket: zmq.Socket[bytes]) -> int:
    """Last sequence number of a replay; -1 if there is nothing to replay."""
    last = -1
    while True:
        assert socket.poll(SETTLE_S * 1000), "a replay socket is silent"
        seq = int.from_bytes(socket.recv_multipart()[-2], "big", signed=True)
        if seq < 0:
            return last
        last = seq


def _command(process: psutil.Process) -> list[str]:
    try:
        return [str(process.pid), *process.cmdline()[:6]]
    except psutil.Error:
        return [str(process.pid)]
