"""`python -m deployment indexer`: a service without Ray, on loopback, that ends when told."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from deployment.cli import main
from tests.ports import free_port

PATIENCE_S = 60.0


@pytest.fixture
def service() -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    command = [sys.executable, "-m", "deployment", "indexer", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"indexer: http://127.0.0.1:{port}\n"
    yield process, f"http://127.0.0.1:{port}"
    process.kill()
    process.wait(PATIENCE_S)


def test_it_serves_without_ray_and_ends_when_told(service: tuple[subprocess.Popen[str], str]) -> None:
    process, url = service
    worker = {"worker_id": "w0", "endpoint": f"tcp://127.0.0.1:{free_port()}"}
    assert httpx.post(f"{url}/workers", json=worker).status_code == 201
    until_s = time.monotonic() + PATIENCE_S
    while (answer := httpx.post(f"{url}/query", json={"token_ids": [1, 2, 3]}).json()["workers"]["w0"]) != {
        "cached_tokens": 0,
        "state": "unverified",
        "dp_rank": 0,
    }:
        assert time.monotonic() < until_s, answer
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "0"], "port must be 1 to 65535, got '0'"),
        (["--port", "x"], "port must be 1 to 65535, got 'x'"),
        (["--port", "1", "--max-index-mb", "1"], "index size in MB must be 16 to 1048576, got '1'"),
        ([], "the following arguments are required: --port"),
    ],
)
def test_what_cannot_be_is_said(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["indexer", *arguments])
    assert says in capsys.readouterr().err
