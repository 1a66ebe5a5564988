"""The deployment as its users run it: a Ray job, looked at, scaled under traffic, hurt, and ended without a trace."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from deployment.assets.paths import model_dir
from deployment.assets.tiny import make_adapter
from deployment.local_ray import LocalRay
from tests.cluster.conftest import PORT, ROOT, Command

pytestmark = [pytest.mark.ray, pytest.mark.engine]
URL = f"http://127.0.0.1:{PORT}"
READY_S = 300.0
PACE_S = 0.3
ACTIVE = {JobStatus.PENDING, JobStatus.RUNNING}


def _until(condition: Callable[[], Any], what: str, timeout_s: float = READY_S) -> Any:
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


def _alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie only waits for its new parent to take note."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


class Job:
    """The submitted deployment."""

    def __init__(self, ray: LocalRay, command: Command, config: Path) -> None:
        self.ray, self.command = ray, command
        self.client = JobSubmissionClient(ray.dashboard)
        environment = {"working_dir": str(ROOT), "excludes": [".git", ".venv*", ".demo", "tests"]}
        entrypoint = f"python -m deployment up {config}"
        self.id = self.client.submit_job(entrypoint=entrypoint, runtime_env=environment)

    def log(self) -> str:
        return self.client.get_job_logs(self.id)

    def state(self) -> dict[str, Any]:
        done = self.command("status", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def actors(self) -> dict[str, dict[str, Any]]:
        """What the dashboard tells of living actors, by name."""
        with urllib.request.urlopen(f"{self.ray.dashboard}/api/v0/actors?detail=1&limit=100", timeout=30) as answer:
            found = json.load(answer)["data"]["result"]["result"]
        return {actor["name"]: actor for actor in found if actor["state"] == "ALIVE"}

    def wait_log(self, line: str) -> None:
        def seen() -> bool:
            assert self.client.get_job_status(self.id) in ACTIVE, self.log()
            return line in self.log()

        _until(seen, line)


@pytest.fixture(scope="module")
def job(ray_cluster: LocalRay, command: Command, config_file: Callable[..., Path]) -> Iterator[Job]:
    job = Job(ray_cluster, command, config_file(count=2))
    job.wait_log("ready: http")
    yield job
    if job.client.get_job_status(job.id) in ACTIVE:
        job.client.stop_job(job.id)


class Traffic:
    """Requests from a few threads until told to stop; remembers every failure."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.answered = 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(3)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            model = ["tiny-llama", "adapter-a"][turn % 2]
            body = {"model": model, "prompt": f"client {number} " * 8 + str(turn % 7), "max_tokens": 4}
            request = urllib.request.Request(
                f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    answer.read()
                self.answered += 1
            except OSError as exc:
                self.failures.append(f"{type(exc).__name__}: {exc}")
            self._stop.wait(PACE_S)  # the engine that starts beside needs the cores


def test_status_shows_the_fleet(job: Job) -> None:
    found = job.state()

    assert found["state"] == "ready"
    assert [worker["id"] for worker in found["workers"]] == ["w0", "w1"]
    for rank, worker in enumerate(found["workers"]):
        assert worker["state"] == "ready"
        assert worker["dp_ranks"] == [rank]
        assert worker["page_size"] == 16
        assert worker["adapters"] == {"adapter-a": "loaded"}
        assert worker["in_flight"] == 0
        assert worker["ranks"][0]["state"] == "exact"
    assert found["router"]["url"] == URL
    assert found["table"]["adapters"] == ["adapter-a"]
    lora_ids = {row["lora_id"] for row in found["table"]["holdings"]}
    assert len(lora_ids) == 1, "the adapter has one id in the whole fleet"


def test_tour_is_exact(job: Job) -> None:
    done = job.command("tour", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["exact"] == found["total"] >= 16
    assert any(one["cached_tokens"] for one in found["requests"])


def test_route_explains_without_running(job: Job, tmp_path: Path) -> None:
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "hello"}]))

    done = job.command("route", "--model", "adapter-a", "--messages", str(messages), "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["worker"] in {"w0", "w1"}
    assert len(found["candidates"]) == 2
    for candidate in found["candidates"]:
        assert sum(candidate["terms_ms"].values()) == pytest.approx(candidate["cost_ms"], abs=0.01)


def test_audit_is_clean(job: Job) -> None:
    done = job.command("audit", "--json")

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["clean"], found["ghosts"], found["missing"]) == (True, 0, 0)
    assert {source["worker"] for source in found["sources"]} == {"w0", "w1"}


def test_adapters_are_loaded_and_unloaded_by_command_and_outlive_the_table(job: Job, shelf: Path) -> None:
    adapter = make_adapter(model_dir("tiny-llama"), shelf / "extra", seed=9)
    load = job.command("adapters", "load", "extra", str(adapter))
    assert load.returncode == 0, load.stdout + load.stderr
    assert "extra on w0: loaded" in load.stdout
    assert "extra on w1: loaded" in load.stdout

    os.kill(job.actors()["loray/jobtest/lora_table"]["pid"], signal.SIGKILL)

    def listed() -> set[str]:
        done = job.command("adapters", "list", "--json")
        return {one["name"] for one in json.loads(done.stdout)["adapters"]} if done.returncode == 0 else set()

    assert _until(lambda: (names := listed()) == {"adapter-a", "extra"} and names, "the table is back")
    _until(lambda: job.state()["state"] == "ready", "the table has heard from everybody")
    where = job.command("adapters", "where", "extra")
    assert "w0: loaded" in where.stdout
    assert job.command("adapters", "reload", "extra").stdout.rstrip().endswith("same content")
    assert job.command("adapters", "unload", "extra").returncode == 0
    assert listed() == {"adapter-a"}
    gone = job.command("adapters", "where", "extra")
    assert (gone.returncode, "adapter 'extra' isn't offered; offered: adapter-a" in gone.stderr) == (2, True)


def test_dashboard_names_the_actors_and_metrics_carry_predictions(job: Job) -> None:
    alive = set(job.actors())
    prefix = "loray/jobtest/"
    assert {prefix + name for name in ("controller", "lora_table", "router/r0", "worker/w0", "worker/w1")} <= alive

    def exported() -> bool:
        text = "".join(_ray_metrics(job.ray))
        return "loray_predictions" in text and "loray_cached_blocks" in text

    _until(exported, "the router's metrics on Ray's endpoint", 60)


def _ray_metrics(ray: LocalRay) -> Iterator[str]:
    with urllib.request.urlopen(f"{ray.dashboard}/nodes?view=summary", timeout=30) as answer:
        nodes = json.load(answer)["data"]["summary"]
    for node in nodes:
        address, port = node["raylet"]["nodeManagerAddress"], node["raylet"]["metricsExportPort"]
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=30) as answer:
            yield answer.read().decode()


def test_apply_up_and_down_under_traffic_fails_no_request(job: Job, config_file: Callable[..., Path]) -> None:
    with Traffic() as traffic:
        up = job.command("apply", str(config_file(count=3)), "--wait", str(READY_S), timeout_s=READY_S + 30)
        assert up.returncode == 0, up.stderr
        assert [worker["id"] for worker in job.state()["workers"]] == ["w0", "w1", "w2"]
        down = job.command("apply", str(config_file(count=1)), "--wait", str(READY_S), timeout_s=READY_S + 30)
        assert down.returncode == 0, down.stderr

    assert traffic.failures == []
    assert traffic.answered > 0
    assert [worker["id"] for worker in job.state()["workers"]] == ["w0"]
    assert "worker w2: left" in job.log()


def test_apply_refuses_what_it_cannot_change(job: Job, config_file: Callable[..., Path]) -> None:
    done = job.command("apply", str(config_file(count=1, port="8178")))

    assert done.returncode == 2
    assert "apply can change workers.count only; also changed: router.port" in done.stderr


def test_a_second_deployment_of_the_name_is_refused(job: Job, config_file: Callable[..., Path]) -> None:
    done = job.command("up", str(config_file(count=1)))

    assert done.returncode == 2
    assert "'jobtest' is running already" in done.stderr


def test_a_dead_worker_actor_is_made_anew(job: Job) -> None:
    before = job.state()["workers"][0]
    actor = psutil.Process(before["engine_pid"]).parent()
    assert actor is not None

    os.kill(actor.pid, signal.SIGKILL)

    def recovered() -> bool:
        found = job.state()
        return bool(found["state"] == "ready" and found["workers"][0]["incarnation"] != before["incarnation"])

    _until(recovered, "a new worker")
    assert not psutil.pid_exists(before["engine_pid"]), "the engine followed its worker"
    audit = json.loads(job.command("audit", "--json").stdout)
    assert (audit["clean"], audit["ghosts"]) == (True, 0), "nothing of the old cache is claimed"
    tour = job.command("tour", "--json")
    assert tour.returncode == 0, tour.stdout + tour.stderr


def test_down_leaves_nothing_behind(job: Job) -> None:
    engine = psutil.Process(job.state()["workers"][0]["engine_pid"])
    family = [engine, *engine.children(recursive=True)]

    done = job.command("down")

    assert done.returncode == 0, done.stderr
    assert _alive(family) == []
    _until(lambda: job.client.get_job_status(job.id) == JobStatus.SUCCEEDED, "the job's end", 60)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", PORT))
    gone = job.command("status")
    assert gone.returncode == 2
    assert "Running: none" in gone.stderr


def test_stopping_the_job_leaves_no_process(
    ray_cluster: LocalRay, command: Command, config_file: Callable[..., Path]
) -> None:
    job = Job(ray_cluster, command, config_file(count=1))
    job.wait_log("engine is starting")
    engine = _until(lambda: job.state()["workers"] and job.state()["workers"][0].get("engine_pid"), "an engine")
    process = psutil.Process(engine)
    family = [process, *process.children(recursive=True)]

    job.client.stop_job(job.id)

    _until(lambda: job.client.get_job_status(job.id) == JobStatus.STOPPED, "the job's end", 60)
    _until(lambda: not _alive(family), "the engine's end", 60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": "1"}, "2 workers need 2 GPUs (1 each), the cluster has 0"),
        ({"model_path": "/nowhere/model"}, "model folder /nowhere/model has no config.json"),
        ({"adapter": "/nowhere/adapter"}, "adapter 'adapter-a' can't be served: adapter folder /nowhere/adapter does"),
    ],
    ids=["too few GPUs", "missing model", "missing adapter"],
)
def test_what_cannot_start_says_why(
    command: Command, config_file: Callable[..., Path], changes: dict[str, str], message: str
) -> None:
    done = command("up", str(config_file("broken", **changes)))

    assert done.returncode == 1
    assert message in done.stderr


def test_taken_port_says_which(command: Command, config_file: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = command("up", str(config_file("broken", port=str(port))))

    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr or f"'127.0.0.1', {port}" in done.stderr
