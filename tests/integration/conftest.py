"""One fleet of two workers for all tests of this package. Tests with a fleet of their own come first.

What an emulated engine must do as the real one does is tested on both, in the same tests: the modules of CONFORMANCE.
"""

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
CONFORMANCE = ("test_exact_prediction.py", "test_late_router.py", "test_reload.py", "test_wire.py")
_EMULATED = "tiny-cpu"
"""Profile of the emulated engines: about as fast as the others."""
_OWN_FLEET = (
    "test_dp_ranks.py",
    "test_failover_cases.py",
    "test_fairness.py",
    "test_leaving_clients.py",
    "test_load_cases.py",
    "test_many_adapters.py",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of the shared fleet run on SGLang's engines, those of the conformance suite on emulated ones as well.

    A module's own fleet gets no parameter: with one, it would live as long as the package.
    """
    shares = metafunc.module.__name__.startswith(__package__) and not hasattr(metafunc.module, "fleet")
    if "fleet" in metafunc.fixturenames and shares:
        kinds = ["sglang", "emulated"] if Path(metafunc.module.__file__).name in CONFORMANCE else ["sglang"]
        metafunc.parametrize("fleet", kinds, indirect=True, scope="package")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with a fleet of their own first: the shared one isn't up yet then, and memory is scarce."""
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if item.path.parent == here]
    ours = sorted((items[at] for at in places), key=_turn)
    for at, item in zip(places, ours, strict=True):
        items[at] = item


def _turn(item: pytest.Item) -> int:
    if item.path.name in _OWN_FLEET:
        return 0
    callspec = getattr(item, "callspec", None)
    return 2 if callspec is not None and "emulated" in callspec.params.values() else 1


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
def fleet(request: pytest.FixtureRequest, tiny_model: Path, shelf: Path) -> Iterator[LocalFleet]:
    """Two workers with both adapters, one router. Every test leaves it whole."""
    emulated = _EMULATED if request.param == "emulated" else None
    fleet = LocalFleet(tiny_model, num_workers=2, replay_buffer=REPLAY_BUFFER, roots=[shelf], emulated=emulated)
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
