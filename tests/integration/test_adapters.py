"""Adapters at run time, on real engines: one name, one identity, loaded where it is needed (cases 13, 21-27)."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from actors.adapters.sources import SourceError
from actors.engine.identity import content_id, lora_id
from deployment.assets.tiny import make_adapter
from router.hashing import Namespace, block_hashes
from tests.integration.adapters import engines_own_lists, known_to_router, listed, load, on_shelf, reload, unload
from tests.integration.asking import COMPLETIONS, ask, events, noise
from tests.integration.background_loop import SETTLE_S, poll
from tests.integration.event_tap import barrier, tapped
from tests.integration.local_fleet import ADAPTERS, PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NAME = "run-time"
BOTH = ("w0", "w1")
OUTSIDE = "lies under none of the folders and URIs in lora.roots"


@pytest.fixture
def path(fleet: LocalFleet, shelf: Path) -> Path:
    return on_shelf(fleet, shelf, NAME, seed=7)


@pytest.fixture
def loaded(fleet: LocalFleet, client: httpx.Client, path: Path) -> Iterator[dict[str, Any]]:
    """NAME, loaded everywhere; gone afterwards."""
    found = load(client, NAME, path)
    known_to_router(fleet, NAME, *BOTH)
    yield found
    if NAME in listed(client):
        unload(client, NAME)
    known_to_router(fleet, NAME)


def test_an_adapter_loaded_at_run_time_is_served_by_its_bare_name_on_every_worker(
    fleet: LocalFleet, client: httpx.Client, loaded: dict[str, Any], path: Path
) -> None:
    assert (loaded["success"], loaded["content_id"]) == (True, content_id(path))
    assert {w: one["state"] for w, one in loaded["results"].items()} == dict.fromkeys(BOTH, "loaded")
    text = noise(random.Random(1), 40)
    answers = {
        name: ask(client, prompt=text, model=name, max_tokens=8).text for name in (NAME, f"{SERVED}:{NAME}", SERVED)
    }
    assert answers[NAME] == answers[f"{SERVED}:{NAME}"] != answers[SERVED]
    card = client.get(f"/v1/models/{NAME}").json()
    assert (card["parent"], card["holders"]) == (SERVED, list(BOTH))
    assert engines_own_lists(fleet) == {worker: {*ADAPTERS, NAME} for worker in BOTH}


def test_two_workers_publish_the_same_hashes_for_it(fleet: LocalFleet, loaded: dict[str, Any], path: Path) -> None:
    text = noise(random.Random(2), 3 * PAGE + 1)
    tokens = list(text.encode())
    namespace = Namespace.of(extra_key=None, lora_id=lora_id(NAME, content_id(path)), cache_salt=None)
    expected = block_hashes(tokens, PAGE, namespace)
    with tapped(fleet) as taps:
        for source, tap in taps.items():
            with fleet.engine(source.worker_id) as engine:
                ask(engine, model=f"{SERVED}:{NAME}", prompt=text)
            barrier(fleet, source, tap)
            assert [h for e in tap.stored(tokens) for h in e["block_hashes"]][:3] == expected


def test_a_reload_keeps_the_cache_of_the_same_files_and_not_that_of_others(
    fleet: LocalFleet, client: httpx.Client, loaded: dict[str, Any], path: Path
) -> None:
    prompt = noise(random.Random(3), 3 * PAGE + 2)

    def both() -> list[tuple[int | None, int, str]]:
        """Prediction, engine's word and answer of whoever is asked first, then again."""
        found = []
        for _ in range(2):
            answer = ask(client, prompt=prompt, model=NAME, max_tokens=8)
            found.append((answer.predicted, answer.cached, answer.text))
        return found

    [(_, _, first), (warm, _, _)] = both()
    assert warm == 3 * PAGE
    assert reload(client, NAME)["changed"] is False
    assert both()[0] == (3 * PAGE, 3 * PAGE, first)

    make_adapter(fleet.model, path, seed=8)
    changed = reload(client, NAME)
    assert (changed["changed"], changed["content_id"]) == (True, content_id(path))
    (predicted, cached, second), *_ = both()
    assert (predicted, cached) == (0, 0)
    assert second != first

    make_adapter(fleet.model, path, seed=7)
    reload(client, NAME)
    fleet.settle()
    assert both()[0] == (3 * PAGE, 3 * PAGE, first)


def test_unloading_refuses_new_requests_lets_the_running_one_finish_and_is_final(
    fleet: LocalFleet, client: httpx.Client, loaded: dict[str, Any]
) -> None:
    body = {"model": NAME, "prompt": noise(random.Random(4), 30), "max_tokens": 300, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    short = {**body, "stream": False, "max_tokens": 1}
    with (
        httpx.Client(base_url=fleet.url, timeout=SETTLE_S) as other,
        other.stream("POST", COMPLETIONS, json=body) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        lines = stream.iter_lines()
        next(lines)
        unloading = pool.submit(unload, other, NAME)
        refused = poll(
            lambda: (a := client.post(COMPLETIONS, json=short)).status_code == 404 and a,
            what="new requests are refused",
        )
        assert refused.json()["error"]["code"] == "model_not_found"
        rest = "\n".join(lines)
        assert unloading.result(SETTLE_S)["success"]
    assert rest.rstrip().endswith("data: [DONE]")
    assert '"error"' not in rest
    assert engines_own_lists(fleet) == {worker: set(ADAPTERS) for worker in BOTH}
    with fleet.engine("w0") as engine:
        again = engine.post(COMPLETIONS, json={"model": f"{SERVED}:{NAME}", "prompt": "x", "max_tokens": 1})
    assert again.status_code == 400, again.text
    assert engines_own_lists(fleet)["w0"] == set(ADAPTERS)


def test_a_failure_on_one_worker_is_its_own_and_heals(
    fleet: LocalFleet, client: httpx.Client, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = fleet.workers["w1"].life._loader  # type: ignore[index]  # a WorkerId
    assert loader is not None
    fetch = loader._cache.fetch
    broken = threading.Event()
    broken.set()

    def failing(source: str, expected: str | None = None) -> Path:
        if broken.is_set():
            raise SourceError("the disk is on fire")
        return fetch(source, expected)

    monkeypatch.setattr(loader._cache, "fetch", failing)
    found = load(client, NAME, path)
    assert {w: one["state"] for w, one in found["results"].items()} == {"w0": "loaded", "w1": "failed"}
    assert found["results"]["w1"]["error"] == "the disk is on fire"
    known_to_router(fleet, NAME, "w0")
    assert [ask(client, prompt=f"{i}", model=NAME).worker for i in range(4)] == ["w0"] * 4
    broken.clear()
    known_to_router(fleet, NAME, *BOTH)
    unload(client, NAME)


def test_an_adapter_on_one_worker_only_is_asked_there(fleet: LocalFleet, client: httpx.Client, path: Path) -> None:
    found = load(client, NAME, path, placement="replicas", replicas=1)
    [holder] = found["results"]
    known_to_router(fleet, NAME, holder)
    assert {ask(client, prompt=f"{i}", model=NAME).worker for i in range(6)} == {holder}
    assert client.get(f"/v1/models/{NAME}").json()["holders"] == [holder]
    unload(client, NAME)


def damaged(path: Path, weights: dict[str, Any]) -> Path:
    save_file(weights, path / "adapter_model.safetensors")
    return path


def test_what_cannot_be_served_is_refused_and_disturbs_nobody(
    fleet: LocalFleet, client: httpx.Client, shelf: Path, tmp_path: Path
) -> None:
    def refused(name: str, path: Path) -> str:
        answer = client.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_refused")
        return str(answer.json()["error"]["message"])

    good = on_shelf(fleet, shelf, "good", seed=1)
    assert "named like the served model" in refused(SERVED, good)
    assert OUTSIDE in refused("outside", make_adapter(fleet.model, tmp_path / "a", seed=1))
    assert OUTSIDE in refused("escaping", shelf / ".." / ".." / "a")
    assert "does not exist" in refused("nowhere", shelf / "nowhere")
    assert "is offered already" in refused(ADAPTERS[0], good)
    large = make_adapter(fleet.model, shelf / "large", seed=1, rank=32)
    assert "its rank is 32, engines were started with lora.max_rank 16" in refused("large", large)
    import torch

    half = make_adapter(fleet.model, shelf / "half", seed=1, dtype=torch.float16)
    weights = load_file(half / "adapter_model.safetensors")
    key = sorted(weights)[0]
    weights[key][0, 0] = np.nan
    assert "holds an infinity or NaN" in refused("nan", damaged(half, weights))
    assert set(listed(client)) == set(ADAPTERS)
    assert ask(client, prompt="all is well").text is not None


def test_bad_bodies_are_refused(client: httpx.Client) -> None:
    for body in ({}, {"lora_name": "", "lora_path": "/x"}, {"lora_name": "x"}, {"lora_name": 5, "lora_path": "/x"}):
        answer = client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 400, answer.text
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "nobody"})
    assert (gone.status_code, "isn't offered" in gone.json()["error"]["message"]) == (400, True)


def test_fifty_calls_at_once_under_traffic_leave_table_and_engines_alike(
    fleet: LocalFleet, client: httpx.Client, shelf: Path
) -> None:
    names = [f"many-{i}" for i in range(8)]
    paths = {name: on_shelf(fleet, shelf, name, seed=100 + i) for i, name in enumerate(names)}
    ended, failures, served = threading.Event(), [], []

    def traffic(seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=fleet.url, timeout=SETTLE_S) as mine:
            while not ended.is_set():
                model = rng.choice([SERVED, *ADAPTERS, *names])
                answer = mine.post(COMPLETIONS, json={"model": model, "prompt": noise(rng, 20), "max_tokens": 1})
                if answer.status_code == 200:
                    served.append(model)
                elif answer.status_code != 404:
                    failures.append((model, answer.text))

    def call(i: int) -> int:
        name = names[i % len(names)]
        with httpx.Client(base_url=fleet.url, timeout=3 * SETTLE_S) as mine:
            if i % 3 == 2:
                return mine.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code
            body = {"lora_name": name, "lora_path": str(paths[name])}
            return mine.post("/v1/load_lora_adapter", json=body).status_code

    threads = [threading.Thread(target=traffic, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(50) as pool:
        statuses = list(pool.map(call, range(50)))
    ended.set()
    for thread in threads:
        thread.join(SETTLE_S)
    assert set(statuses) <= {200, 400, 502}, statuses
    assert failures == []
    assert served
    offered = set(listed(client))
    poll(lambda: engines_own_lists(fleet) == dict.fromkeys(BOTH, offered), what="engines hold what the table says")
    for name in offered - set(ADAPTERS):
        known_to_router(fleet, name, *BOTH)
        unload(client, name)
    assert engines_own_lists(fleet) == {worker: set(ADAPTERS) for worker in BOTH}


def test_the_table_dies_and_what_was_loaded_at_run_time_is_still_there(
    fleet: LocalFleet, client: httpx.Client, loaded: dict[str, Any]
) -> None:
    before = fleet.call(lambda: fleet.table.view().epoch)
    fleet.run(fleet.port.kill())
    assert [ask(client, prompt=f"{i}", model=NAME).text is not None for i in range(4)] == [True] * 4
    refused = client.post("/v1/unload_lora_adapter", json={"lora_name": NAME})
    assert refused.status_code == 500
    fleet.run(fleet.port.revive())
    assert ask(client, prompt="meanwhile", model=NAME).text is not None
    fleet.wait(lambda: fleet.core.table.epoch not in ("", before), what="the router follows the new table")
    known_to_router(fleet, NAME, *BOTH)
    assert set(listed(client)) == {*ADAPTERS, NAME}
    assert engines_own_lists(fleet) == {worker: {*ADAPTERS, NAME} for worker in BOTH}
    assert ask(client, prompt="afterwards", model=NAME).text is not None


def test_a_restarted_engine_holds_again_what_it_should(
    fleet: LocalFleet, client: httpx.Client, loaded: dict[str, Any]
) -> None:
    import psutil

    incarnation = fleet.call(lambda: fleet.workers["w1"].life.incarnation)  # type: ignore[index]  # a WorkerId
    psutil.Process(fleet.engine_pid("w1")).kill()
    fleet.wait(lambda: fleet.workers["w1"].life.incarnation != incarnation, what="it died")  # type: ignore[index]
    assert [ask(client, prompt=f"{i}", model=NAME).worker for i in range(3)] == ["w0"] * 3
    fleet.wait_whole(within_s=300)
    known_to_router(fleet, NAME, *BOTH)
    assert engines_own_lists(fleet) == {worker: {*ADAPTERS, NAME} for worker in BOTH}


def test_streams_are_well_formed_for_adapters_too(client: httpx.Client, loaded: dict[str, Any]) -> None:
    with client.stream(
        "POST", COMPLETIONS, json={"model": NAME, "prompt": "x", "max_tokens": 3, "stream": True}
    ) as got:
        got.read()
    *chunks, done = events(got.text)
    assert done == "[DONE]"
    assert all(json.loads(chunk)["choices"] is not None for chunk in chunks)


def test_pinning_is_kept_and_shown(client: httpx.Client, loaded: dict[str, Any]) -> None:
    client.post("/loray/adapters/pin", json={"lora_name": NAME})
    assert listed(client)[NAME]["pinned"] is True
    client.post("/loray/adapters/unpin", json={"lora_name": NAME})
    assert listed(client)[NAME]["pinned"] is False
