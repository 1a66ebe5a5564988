"""A fleet of emulated engines for tests of load and failure: small memory, an admission of the test's choice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import psutil

from actors.router import Router, RouterSettings
from router.admission import AdmissionConfig
from router.choice import LoggedDecision
from router.ids import Incarnation, WorkerId
from router.reports import WorkerState
from tests.integration.background_loop import poll
from tests.integration.local_fleet import BOOT_S, LocalFleet

PROFILE: Final = "tiny-cpu"


class DecisionLog(msgspec.Struct, frozen=True):
    """What `/loray/decisions` answers."""

    seed: str
    decisions: list[LoggedDecision]


class EmulatedFleet(LocalFleet):
    """`admission` is that of routers made from now on."""

    def __init__(
        self, model: Path, *, num_workers: int, admission: AdmissionConfig | None = None, **options: Any
    ) -> None:
        super().__init__(model, num_workers=num_workers, emulated=PROFILE, **options)
        self.admission = admission or AdmissionConfig()
        #: lives that tests have ended
        self._ended: set[Incarnation] = set()

    def router_settings(self, router_id: str) -> RouterSettings:
        """With this fleet's admission."""
        settings = super().router_settings(router_id)
        config = msgspec.structs.replace(settings.config, admission=self.admission)
        return msgspec.structs.replace(settings, config=config)

    @contextmanager
    def router_with(self, admission: AdmissionConfig) -> Iterator[tuple[Router, str]]:
        """One more router, with an admission of its own; whole."""
        former, self.admission = self.admission, admission
        try:
            with self.another_router() as (router, url):
                self.wait_whole(router)
                yield router, url
        finally:
            self.admission = former

    def decisions(self, since: int = 0, router: Router | None = None) -> DecisionLog:
        """The latest decisions of a router, over HTTP."""
        url = f"http://127.0.0.1:{(router or self.router)._settings.config.port}"
        with self.client(url) as client:
            answer = client.get("/loray/decisions", params={"since": since})
        assert answer.status_code == 200, answer.text
        return msgspec.json.decode(answer.content, type=DecisionLog)

    def next_number(self, router: Router | None = None) -> int:
        """Number of the router's next decision."""
        return self.call(lambda: (router or self.router)._core._num_decisions)

    def queued(self, router: Router | None = None) -> int:
        """Requests that wait in a router."""
        return self.call(lambda: len((router or self.router)._admission))

    def booked(self, router: Router | None = None) -> int:
        """Requests that a router has sent and that aren't over."""
        return self.call(lambda: int((router or self.router)._core.load.running.sum()))

    def wait_at_rest(self, router: Router | None = None) -> None:
        """Until nothing runs or waits anywhere; then every counter is at 0."""
        router = router or self.router
        poll(lambda: self.booked(router) == 0, what="nothing booked")
        poll(lambda: self.queued(router) == 0, what="nothing queued")
        poll(lambda: sum(map(self.running, self.workers)) == 0, what="engines idle")
        self.check(router)

        def checked() -> None:
            load, gate = router._core.load, router._gate
            for name in ("queued_tokens", "queued_ms", "running", "kv_tokens", "distinct"):
                assert not getattr(load, name).any(), (name, getattr(load, name))
            assert not gate.waiting, gate.waiting
            assert not router._admission._waiters, router._admission._waiters
            assert router._admission._going is None
            assert not router._dispatcher._failover._attempts

        self.call(checked)

    def engine_process(self, worker_id: str) -> psutil.Process:
        """The emulated engine itself, which isn't its launcher's child."""
        port = urlsplit(self.engine_url(worker_id)).port
        owners = [
            one.pid
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
        ]
        assert len(owners) == 1, owners
        return psutil.Process(owners[0])

    def kill_engine(self, worker_id: str, process: psutil.Process | None = None) -> None:
        """Its launcher dies, and it with it; or another process of its."""
        self._ended.add(self.call(lambda: self.workers[WorkerId(worker_id)].report().incarnation))
        (process or psutil.Process(self.engine_pid(worker_id))).kill()

    def wait_back(self) -> None:
        """Until every engine that was killed lives anew, and the router knows."""

        def is_back(worker_id: WorkerId) -> bool:
            report, record = self.workers[worker_id].report(), self.core.workers.get(worker_id)
            known = record is not None and record.report.incarnation == report.incarnation
            return report.state is WorkerState.READY and known and report.incarnation not in self._ended

        self.wait(lambda: all(map(is_back, self.workers)), within_s=BOOT_S, what="all back")
        self.wait_whole()

    @contextmanager
    def stopped(self, *worker_ids: str) -> Iterator[dict[str, psutil.Process]]:
        """Engines that stand still, not dead, for as long."""
        processes = {worker_id: self.engine_process(worker_id) for worker_id in worker_ids}
        try:
            for process in processes.values():
                process.send_signal(signal.SIGSTOP)
            yield processes
        finally:
            for process in processes.values():
                if process.is_running():
                    process.send_signal(signal.SIGCONT)
