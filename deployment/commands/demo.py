"""`demo`: a real model on this machine's CPU, two engines, two adapters, a job on a local Ray, a tour."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from deployment import local_ray
from deployment.config import Config
from deployment.local_ray import LocalRay

_ROOT: Final = Path(__file__).resolve().parents[2]
_CONFIG: Final = Path("configs/laptop-cpu.yaml")
_FOLDER: Final = _ROOT / ".demo"
_RAY: Final = _FOLDER / "ray.json"
_READY_S: Final = 600.0
_POLL_S: Final = 1.0
_QUIET_S: Final = 10.0
_DOWN_S: Final = 30.0


def run(arguments: argparse.Namespace) -> int:
    """Start what isn't running, take the tour, leave the fleet up; with --stop, end it."""
    if arguments.stop:
        return _stop()
    config = Config.load(_ROOT / _CONFIG)
    _step("model: SmolLM2-135M-Instruct")
    subprocess.run([sys.executable, "-m", "deployment.assets", "smollm2"], cwd=_ROOT, check=True)
    ray = local_ray.load(_RAY)
    if ray is None:
        _step("starting Ray on 127.0.0.1 ...")
        ray = local_ray.start(_FOLDER)
        local_ray.save(ray, _RAY)
    os.environ.update(ray.environment())
    _step(f"Ray dashboard: {ray.dashboard}")
    _submit(ray, config)
    url = f"http://{config.router.host}:{config.router.port}"
    print()
    toured = subprocess.run([sys.executable, "-m", "deployment", "tour", "--url", url], cwd=_ROOT, check=False)
    print(
        f"\nendpoint:  {url}/v1\ndashboard: {ray.dashboard}\ntry:\n"
        f"  curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' "
        '-d \'{"model": "alpha", "messages": [{"role": "user", "content": "What do bees make?"}], "max_tokens": 24}\'\n'
        "  .venv/bin/python -m deployment status\nstop it with: make down"
    )
    return toured.returncode


def _submit(ray: LocalRay, config: Config) -> None:
    """Submit the deployment as a Ray job unless it runs, and wait until it is ready. Raises RuntimeError."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.WARNING)
    client = JobSubmissionClient(ray.dashboard)
    entrypoint = f"python -m deployment up {_CONFIG}"
    active = {JobStatus.PENDING, JobStatus.RUNNING}
    jobs = [job for job in client.list_jobs() if job.entrypoint == entrypoint and job.status in active]
    if jobs:
        job_id = str(jobs[0].submission_id)
        _step(f"job {job_id} is running already")
    else:
        environment = {"working_dir": str(_ROOT), "excludes": [".git", ".venv*", ".demo", "tests"]}
        metadata = {"name": f"loray {config.name}", "model": config.model.served_name}
        job_id = client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata=metadata)
        _step(f"job {job_id}: {entrypoint}")
        _step("engines are starting: about 20 s each on two idle cores ...")
    shown = 0
    started_s = told_s = time.monotonic()
    while True:
        log = client.get_job_logs(job_id)
        complete = log[: log.rfind("\n") + 1]
        for line in complete[shown:].splitlines():
            _step(f"  {line}")
        if len(complete) > shown:
            shown, told_s = len(complete), time.monotonic()
        elif time.monotonic() - told_s > _QUIET_S:
            told_s = time.monotonic()
            _step(f"  ... still starting, {told_s - started_s:.0f} s")
        if "ready: http" in complete:
            return
        status = client.get_job_status(job_id)
        if status not in active:
            raise RuntimeError(f"the job is {status}: {client.get_job_info(job_id).message}")
        if time.monotonic() - started_s > _READY_S:
            raise RuntimeError(f"not ready after {_READY_S:.0f} s; see {ray.dashboard}")
        time.sleep(_POLL_S)


def _stop() -> int:
    ray = local_ray.load(_RAY)
    if ray is None:
        print("nothing to stop")
        return 0
    _step("ending the deployment ...")
    command = [sys.executable, "-m", "deployment", "down", "--name", Config.load(_ROOT / _CONFIG).name]
    ended = subprocess.run(
        command, cwd=_ROOT, env=ray.environment(), check=False, capture_output=True, text=True, timeout=_DOWN_S * 2
    )
    _step((ended.stdout or ended.stderr).strip())
    _step("ending Ray ...")
    ray.stop()
    _RAY.unlink(missing_ok=True)
    return 0


def _step(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
