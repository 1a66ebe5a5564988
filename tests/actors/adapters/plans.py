"""A placement plan that tests can talk to in few words."""

from __future__ import annotations

from typing import Any

from actors.adapters.entry import Entry, Placement
from actors.adapters.placement import Place, PlacementPlan
from router.ids import WorkerId

W0, W1, W2 = WorkerId("w0"), WorkerId("w1"), WorkerId("w2")
EVERYWHERE, REPLICAS, ON_DEMAND = Placement.EVERYWHERE, Placement.REPLICAS, Placement.ON_DEMAND


def entry(name: str, placement: Placement = ON_DEMAND, **terms: Any) -> Entry:
    return Entry(name=name, source=f"/{name}", placement=placement, content_id=f"c-{name}", **terms)


class Plan(PlacementPlan):
    """A plan that tests can talk to in few words, and that checks itself."""

    def __init__(self, *workers: WorkerId, capacity: int = 4, slots: int = 4) -> None:
        super().__init__()
        for worker_id in workers:
            self.enter(worker_id, capacity=capacity, slots=slots)

    def enter(self, worker_id: WorkerId, *, capacity: int = 4, slots: int = 4, now_s: float = 0.0) -> None:
        self.join(worker_id, Place(capacity, slots), held=(), now_s=now_s)

    def offer(self, names: str, placement: Placement = ON_DEMAND, now_s: float = 0.0, **terms: Any) -> None:
        for name in names:
            self.put(entry(name, placement, **terms), now_s=now_s)

    def ask(self, names: str, *preferred: WorkerId, now_s: float = 0.0, more: bool = False, waiting: int = 1) -> None:
        for name in names:
            self.want(name, preferred, waiting=waiting, more=more, now_s=now_s)

    def load(self, now_s: float = 0.0) -> None:
        """Every worker concludes all that is open."""
        for worker_id, place in self.places.items():
            for name in list(place.desired):
                self.concluded(worker_id, name, now_s=now_s)

    @property
    def held(self) -> dict[WorkerId, str]:
        self.check()
        return {worker_id: "".join(sorted(place.desired)) for worker_id, place in self.places.items()}
