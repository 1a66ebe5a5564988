"""The GPU path: real engines on CUDA devices. Run with `pytest -m gpu` where there is one; CI has none."""

from __future__ import annotations

import httpx
import pytest

from deployment.assets.paths import model_dir
from tests.integration.local_fleet import PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.gpu


def test_predictions_are_exact_on_a_gpu() -> None:
    fleet = LocalFleet(model_dir("tiny-llama"), num_workers=1, device="cuda")
    fleet.start()
    try:
        with httpx.Client(base_url=fleet.url, timeout=60) as client:
            for turn in range(12):
                model = [SERVED, "adapter-a", "adapter-b"][turn % 3]
                body = {"model": model, "prompt": list(range(9, 9 + 5 * PAGE + turn)), "max_tokens": 2}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert int(answer.headers["x-loray-predicted-cached-tokens"]) == cached
                assert cached == (5 * PAGE if turn >= 3 else 0)
    finally:
        fleet.stop()


def test_the_cpu_platform_is_inert_where_cuda_is() -> None:
    from actors.engine.plugin import platform

    assert platform() is None
