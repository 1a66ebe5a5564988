"""What every worker was last told to hold, numbered, so that it hears of changes only."""

from __future__ import annotations

from actors.adapters.entry import Assignment, Entry, Wanted
from actors.adapters.placement import PlacementPlan
from router.ids import WorkerId


class Assignments:
    """Follows a plan. Revisions grow within the epoch."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._revision = 0
        self._known: dict[WorkerId, Assignment] = {}

    def get(self, worker_id: WorkerId) -> Assignment:
        """The worker's; revision 0 before its first."""
        return self._known.get(worker_id, Assignment(epoch=self._epoch, revision=0))

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone for good."""
        self._known.pop(worker_id, None)

    def update(self, plan: PlacementPlan) -> bool:
        """Bring all up to the plan; True if any changed."""
        changed = False
        for worker_id, place in plan.places.items():
            changed |= self._assign(worker_id, tuple(_wanted(plan.entries[name]) for name in place.desired))
        for worker_id in self._known.keys() - plan.places.keys():  # it is away, and may come back
            held = self._known[worker_id].wanted
            changed |= self._assign(worker_id, tuple(one for one in held if _is_offered(one, plan)))
        return changed

    def _assign(self, worker_id: WorkerId, wanted: tuple[Wanted, ...]) -> bool:
        known = self._known.get(worker_id)
        if known is not None and known.wanted == wanted:
            return False
        self._revision += 1
        self._known[worker_id] = Assignment(epoch=self._epoch, revision=self._revision, wanted=wanted)
        return True


def _wanted(entry: Entry) -> Wanted:
    return Wanted(name=entry.name, source=entry.source, content_id=entry.content_id, pinned=entry.pinned)


def _is_offered(one: Wanted, plan: PlacementPlan) -> bool:
    entry = plan.entries.get(one.name)
    return entry is not None and entry.content_id == one.content_id
