"""One fleet of two workers for all tests of this package. Tests with a fleet of their own come first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployment.assets import tiny
from deployment.assets.folder import ensure
from deployment.assets.paths import model_dir
from tests.integration.local_fleet import SERVED, LocalFleet

REPLAY_BUFFER = 8
"""Batches that the shared fleet's engines keep: few, so that whoever comes late must take a snapshot."""
_OWN_FLEET = ("test_dp_ranks.py", "test_many_adapters.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with a fleet of their own first: the shared one isn't up yet then, and memory is scarce."""
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if item.path.parent == here]
    ours = sorted((items[at] for at in places), key=lambda item: item.path.name not in _OWN_FLEET)
    for at, item in zip(places, ours, strict=True):
        items[at] = item


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny model, built where it is missing."""
    folder = model_dir(SERVED)
    ensure(folder, tiny.build)
    return folder


@pytest.fixture(scope="package")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that adapters may be loaded from at run time."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="package")
def fleet(tiny_model: Path, shelf: Path) -> Iterator[LocalFleet]:
    """Two workers with both adapters, one router. Every test leaves it whole."""
    fleet = LocalFleet(tiny_model, num_workers=2, replay_buffer=REPLAY_BUFFER, roots=[shelf])
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def client(fleet: LocalFleet) -> Iterator[httpx.Client]:
    """A client of the shared fleet's router; the router's books balance afterwards."""
    fleet.settle()
    with fleet.client() as client:
        yield client
    fleet.settle()
    fleet.check()
