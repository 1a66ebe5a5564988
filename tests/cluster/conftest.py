"""A local Ray of the tests' own, and the command line as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployment import local_ray
from deployment.assets.paths import model_dir
from deployment.local_ray import LocalRay

ROOT = Path(__file__).resolve().parents[2]
PORT = 8177
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="package")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRay]:
    """A head node of our own; nothing of it is left afterwards."""
    ray = local_ray.start(tmp_path_factory.mktemp("ray"))
    yield ray
    ray.stop()
    assert not ray.alive


@pytest.fixture(scope="package")
def command(ray_cluster: LocalRay) -> Command:
    """Run `python -m deployment ...` against the cluster."""

    def run(*arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "deployment", *arguments],
            cwd=ROOT,
            env=ray_cluster.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


@pytest.fixture(scope="package")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that adapters may be loaded from at run time."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="package")
def config_file(tmp_path_factory: pytest.TempPathFactory, shelf: Path) -> Callable[..., Path]:
    """Write a tiny deployment's configuration."""
    folder = tmp_path_factory.mktemp("configs")
    tiny = model_dir("tiny-llama")

    def write(name: str = "jobtest", *, count: int = 2, more: str = "", **changes: str) -> Path:
        values = {
            "model_path": str(tiny), "gpus": "0", "port": str(PORT), "adapter": str(tiny / "adapters" / "adapter-a"),
            **changes,
        }  # fmt: skip
        file = folder / f"{name}-{count}-{len(list(folder.iterdir()))}.yaml"
        file.write_text(
            f"""
name: {name}
model: {{path: {values["model_path"]}, served_name: tiny-llama, dtype: bfloat16, context_length: 2048}}
workers:
  count: {count}
  gpus: {values["gpus"]}
  cpus: 0.3
  extra_args: [--mem-fraction-static, "0.2", --max-total-tokens, "4096", --page-size, "16"]
lora:
  adapters: {{adapter-a: {values["adapter"]}}}
  max_loras_per_batch: 4
  max_rank: 16
  roots: [{shelf}]
router: {{port: {values["port"]}}}
{more}"""
        )
        return file

    return write


@pytest.fixture(scope="package", autouse=True)
def _no_ray_address() -> Iterator[None]:
    """The tests' own process never joins a cluster by accident."""
    before = os.environ.pop("RAY_ADDRESS", None)
    yield
    if before is not None:
        os.environ["RAY_ADDRESS"] = before
