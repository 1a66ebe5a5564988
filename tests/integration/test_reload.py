"""Adapters that come and go at run time: the id follows the files, and so do cached blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from actors.engine.client import EngineError
from actors.engine.identity import content_id, lora_id
from deployment.assets.tiny import make_adapter
from router.hashing import Namespace, block_hashes
from tests.integration.asking import Answer, ask, noise
from tests.integration.event_tap import barrier, tapped
from tests.integration.local_fleet import PAGE, SERVED, LocalFleet

pytestmark = pytest.mark.engine

NAME = "adapter-b"
WORKER = "w1"
NUM_CHARS = 3 * PAGE + 2


@pytest.fixture
def files(fleet: LocalFleet) -> Path:
    """The files that NAME has in the fleet."""
    return fleet.model / "adapters" / NAME


@pytest.fixture
def other_files(fleet: LocalFleet, tmp_path: Path) -> Path:
    """Other weights."""
    return make_adapter(fleet.model, tmp_path / NAME, seed=99)


@pytest.fixture
def engine(fleet: LocalFleet, files: Path) -> Iterator[httpx.Client]:
    """One engine of the fleet; afterwards it holds again what its worker believes."""
    fleet.settle()
    with fleet.engine(WORKER) as engine:
        yield engine
    unload(fleet, missing_ok=True)
    load(fleet, files)
    fleet.settle()


def load(fleet: LocalFleet, path: Path) -> None:
    fleet.with_engine_client(WORKER, lambda client: client.load_adapter(NAME, str(path)))


def unload(fleet: LocalFleet, *, missing_ok: bool = False) -> None:
    try:
        fleet.with_engine_client(WORKER, lambda client: client.unload_adapter(NAME))
    except EngineError:
        if not missing_ok:
            raise


@pytest.fixture
def probe(engine: httpx.Client, request: pytest.FixtureRequest) -> Callable[[], Answer]:
    """Asks the engine the same again and again, a prompt of this test alone."""
    prompt = noise(random.Random(request.node.name), NUM_CHARS)
    return lambda: ask(engine, model=f"{SERVED}:{NAME}", prompt=prompt, max_tokens=8)


def test_the_same_files_come_back_warm(fleet: LocalFleet, files: Path, probe: Callable[[], Answer]) -> None:
    first = probe()
    unload(fleet)
    load(fleet, files)
    again = probe()
    assert (first.cached, again.cached) == (0, 3 * PAGE)
    assert again.text == first.text


def test_other_files_under_the_same_name_come_cold_and_the_old_ones_warm(
    fleet: LocalFleet, files: Path, other_files: Path, probe: Callable[[], Answer]
) -> None:
    first = probe()
    unload(fleet)
    load(fleet, other_files)
    changed = probe()
    unload(fleet)
    load(fleet, files)
    back = probe()
    assert (first.cached, changed.cached, back.cached) == (0, 0, 3 * PAGE)
    assert changed.text != first.text == back.text


@pytest.mark.parametrize("path_of", ["files", "other_files"])
def test_published_hashes_follow_the_files(
    fleet: LocalFleet, path_of: str, engine: httpx.Client, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(path_of)
    unload(fleet)
    load(fleet, path)
    text = noise(random.Random(request.node.name), NUM_CHARS)
    tokens = list(text.encode())
    with tapped(fleet) as taps:
        source, tap = next((s, t) for s, t in taps.items() if s.worker_id == WORKER)
        ask(engine, model=f"{SERVED}:{NAME}", prompt=text)
        barrier(fleet, source, tap)
        stores = tap.stored(tokens)
    namespace = Namespace.of(extra_key=None, lora_id=lora_id(NAME, content_id(path)), cache_salt=None)
    assert [h for e in stores for h in e["block_hashes"]][:3] == block_hashes(tokens, PAGE, namespace)
    assert {e["lora_name"] for e in stores} == {NAME}


@pytest.mark.parametrize("path_of", ["files", "other_files"])
def test_loading_a_loaded_adapter_is_refused_and_the_engine_survives(
    fleet: LocalFleet, path_of: str, probe: Callable[[], Answer], request: pytest.FixtureRequest
) -> None:
    first = probe()
    with pytest.raises(EngineError, match="already"):
        load(fleet, request.getfixturevalue(path_of))
    assert probe().text == first.text
    assert probe().cached == 3 * PAGE


def test_a_folder_without_an_adapter_is_refused_with_its_path(
    fleet: LocalFleet, tmp_path: Path, probe: Callable[[], Answer]
) -> None:
    first = probe()
    unload(fleet)
    with pytest.raises(EngineError, match=str(tmp_path / "nowhere")):
        load(fleet, tmp_path / "nowhere")
    with pytest.raises(EngineError, match=r"adapter_config\.json"):
        load(fleet, tmp_path)
    load(fleet, fleet.model / "adapters" / NAME)
    assert probe().text == first.text
