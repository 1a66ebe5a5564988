"""Which workers hold which adapters: all placing, moving and making room. Pure; times come in from outside.

Theory of operation. `desired` is what each worker is to hold; workers converge to it by themselves and report. A worker
has `capacity` adapters at most, `capacity_bytes` of them, and runs `slots` of them in one batch. An adapter that is
waited for (`want`) goes to the worker that runs out of slots last, then to the one the router prefers. Where there is
no room, the adapters that are used least go, of all workers that could take the new one: uses count with a half-life,
so that a burst doesn't push out what is always used, and what was popular once leaves. Nothing that is pinned, being
loaded, or that was loaded a moment ago is unloaded for another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from actors.adapters.entry import Entry, Placement
from router.ids import WorkerId
from router.reports import WorkerFacts

HALF_LIFE_S: Final = 120.0
"""After so long, a use counts half."""
STAY_S: Final = 2.0
"""An adapter stays so long once it is loaded: whoever waited for it shall be served by it."""
WAIT_S: Final = 5.0
"""A wish that isn't repeated is given up after so long: its requests are gone."""


@dataclass(slots=True)
class Place:
    """One worker as adapters see it."""

    capacity: int
    slots: int
    #: size of all adapters together; 0 for no limit
    capacity_bytes: int = 0
    #: name -> since when it is loaded here, or has failed to; None while that is open
    desired: dict[str, float | None] = field(default_factory=dict)

    @classmethod
    def of(cls, facts: WorkerFacts) -> Place:
        """An empty one, as its worker describes it."""
        return cls(facts.capacity, facts.slots, facts.capacity_bytes)


@dataclass(slots=True)
class _Wish:
    """Requests wait for an adapter that nobody holds, or that wants one holder more."""

    since_s: float
    renewed_s: float
    preferred: tuple[WorkerId, ...]
    waiting: int


class PlacementPlan:
    """See the module. Everything under "events" changes it; all in terms of names and worker ids."""

    def __init__(self) -> None:
        self.places: dict[WorkerId, Place] = {}
        self.entries: dict[str, Entry] = {}
        #: adapters unloaded to make room for another, since the beginning
        self.num_evictions = 0
        #: what workers held that left: theirs again when they come back, unless somebody else has it by then
        self._former: dict[WorkerId, tuple[str, ...]] = {}
        self._uses: dict[str, tuple[float, float]] = {}
        #: by adapter; all and only those that couldn't be placed yet
        self._wishes: dict[str, _Wish] = {}

    # -- events --------------------------------------------------------------------------------------------------

    def join(self, worker_id: WorkerId, place: Place, *, held: Collection[str], now_s: float) -> None:
        """A worker, or another life of it. What it holds already it may keep."""
        known = self.places.get(worker_id)
        desired: dict[str, float | None] = {name: now_s for name in held if self._may_keep(worker_id, name)}
        if known is not None:
            desired = dict.fromkeys(known.desired) | desired
        for name in self._former.pop(worker_id, ()):
            if name in self.entries and not self.holders(name):
                desired.setdefault(name, None)
        place.desired = dict(list(desired.items())[: place.capacity])
        self.places[worker_id] = place
        self.settle(now_s=now_s)

    def leave(self, worker_id: WorkerId, *, now_s: float) -> None:
        """The worker is gone; what must be somewhere is placed elsewhere."""
        place = self.places.pop(worker_id, None)
        if place is not None:
            self._former[worker_id] = tuple(place.desired)
            self.settle(now_s=now_s)

    def put(self, entry: Entry, *, now_s: float) -> None:
        """An adapter that is new, or known with other terms or other weights."""
        self.entries[entry.name] = entry
        self.settle(now_s=now_s)

    def drop(self, name: str, *, now_s: float) -> None:
        """The adapter is offered no more."""
        self.entries.pop(name, None)
        self._wishes.pop(name, None)
        self._uses.pop(name, None)
        self._former = {w: tuple(one for one in names if one != name) for w, names in self._former.items()}
        for place in self.places.values():
            place.desired.pop(name, None)
        self.settle(now_s=now_s)

    def want(self, name: str, preferred: Sequence[WorkerId], *, waiting: int, more: bool, now_s: float) -> None:
        """Requests wait for an adapter; with `more`, its holders are too busy. Workers in the order of preference."""
        entry = self.entries.get(name)
        if entry is None or (not more and self.holders(name)):
            return
        wish = self._wishes.get(name)
        self._wishes[name] = _Wish(wish.since_s if wish else now_s, now_s, tuple(preferred), waiting)
        self.settle(now_s=now_s)

    def concluded(self, worker_id: WorkerId, name: str, *, now_s: float) -> None:
        """A worker has loaded what it was to load, or has failed to."""
        place = self.places.get(worker_id)
        if place is not None and name in place.desired and place.desired[name] is None:
            place.desired[name] = now_s
            self.settle(now_s=now_s)

    def give_up(self, name: str, worker_id: WorkerId, preferred: Sequence[WorkerId]) -> list[WorkerId]:
        """A holder that failed makes way where no more may hold it; returns `preferred` without it."""
        entry = self.entries.get(name)
        elsewhere = any(name not in place.desired for place in self.places.values())
        if entry is None or len(self.holders(name)) < self._most(entry) or not elsewhere:
            return list(preferred)
        self.places[worker_id].desired.pop(name, None)
        return [one for one in preferred if one != worker_id]

    def reopen(self, name: str) -> None:
        """The adapter has other weights now: every holder is to load it again."""
        for place in self.places.values():
            if name in place.desired:
                place.desired[name] = None

    def use(self, counts: Mapping[str, int], *, now_s: float) -> None:
        """Requests that were sent to adapters lately."""
        for name, count in counts.items():
            if name in self.entries:
                self._uses[name] = (self._score(name, now_s) + count, now_s)

    def settle(self, *, now_s: float) -> None:
        """Place what can be placed now. Called again as time goes by: what couldn't move may be free to."""
        for entry in self.entries.values():
            if entry.placement is Placement.EVERYWHERE:
                self._fill(entry, len(self.places), now_s)
            elif entry.placement is Placement.REPLICAS:
                self._fill(entry, entry.replicas, now_s)
                self._trim(entry)
            elif self.holders(entry.name):
                self._fill(entry, entry.replicas, now_s)
        for name, wish in sorted(self._wishes.items(), key=lambda item: (-item[1].waiting, item[1].since_s)):
            if now_s - wish.renewed_s > WAIT_S or self._grant(name, wish, now_s):
                del self._wishes[name]

    # -- to read -------------------------------------------------------------------------------------------------

    def holders(self, name: str) -> list[WorkerId]:
        """Workers that are to hold an adapter."""
        return [worker_id for worker_id, place in self.places.items() if name in place.desired]

    @property
    def waiting(self) -> int:
        """Adapters that requests wait for and that have no place."""
        return len(self._wishes)

    def check(self) -> None:
        """Invariants; for tests."""
        for place in self.places.values():
            assert len(place.desired) <= place.capacity
            assert place.desired.keys() <= self.entries.keys()
        for name, entry in self.entries.items():
            holders = len(self.holders(name))
            if entry.placement is Placement.REPLICAS:
                assert holders <= entry.replicas
            if entry.placement is Placement.ON_DEMAND and entry.max_replicas is not None:
                assert holders <= max(entry.max_replicas, entry.replicas)

    # -- inside --------------------------------------------------------------------------------------------------

    def _fill(self, entry: Entry, count: int, now_s: float) -> None:
        while len(self.holders(entry.name)) < min(count, len(self.places)):
            if not self._place(entry, (), now_s):
                return

    def _trim(self, entry: Entry) -> None:
        holders = sorted(self.holders(entry.name), key=lambda w: self.places[w].desired[entry.name] is None)
        for worker_id in holders[entry.replicas :]:
            del self.places[worker_id].desired[entry.name]

    def _grant(self, name: str, wish: _Wish, now_s: float) -> bool:
        entry = self.entries[name]
        if len(self.holders(name)) >= min(self._most(entry), max(1, len(self.places))):
            return True
        return self._place(entry, wish.preferred, now_s)

    def _place(self, entry: Entry, preferred: Sequence[WorkerId], now_s: float) -> bool:
        """Give one more worker the adapter. False: nobody has room, or can make any."""
        rank = {worker_id: i for i, worker_id in enumerate(preferred)}
        possible = [
            (self._price(entry, place, now_s), rank.get(worker_id, len(rank)), len(place.desired), worker_id)
            for worker_id, place in self.places.items()
            if entry.name not in place.desired
        ]
        for price, _, _, worker_id in sorted(possible, key=lambda p: (p[0] is None, p[0] or (0, 0.0), p[1], p[2])):
            if price is None:
                return False
            place = self.places[worker_id]
            for victim in self._victims(entry, place, now_s) or ():
                del place.desired[victim]
                self.num_evictions += 1
            place.desired[entry.name] = None
            return True
        return False

    def _may_keep(self, worker_id: WorkerId, name: str) -> bool:
        """Whether a worker that comes with an adapter isn't one too many; `settle` trims replicas, loaded ones last."""
        entry = self.entries.get(name)
        if entry is None:
            return False
        others = [other for other in self.holders(name) if other != worker_id]
        return entry.placement is Placement.REPLICAS or len(others) < self._most(entry)

    def _most(self, entry: Entry) -> int:
        """Workers that may hold it."""
        if entry.placement is Placement.REPLICAS:
            return entry.replicas
        if entry.placement is Placement.ON_DEMAND and entry.max_replicas is not None:
            return max(entry.max_replicas, entry.replicas)
        return max(1, len(self.places))

    def _price(self, entry: Entry, place: Place, now_s: float) -> tuple[int, float] | None:
        """What one adapter more costs here: slots lacking, then the uses of what must go for it. None: no room."""
        victims = self._victims(entry, place, now_s)
        if victims is None:
            return None
        return (max(0, len(place.desired) + 1 - place.slots), sum(self._score(name, now_s) for name in victims))

    def _victims(self, entry: Entry, place: Place, now_s: float) -> list[str] | None:
        """What must leave for the adapter: the least used that may, the oldest among equals. None: too little may."""
        lacking = len(place.desired) + 1 - place.capacity
        lacking_bytes = 0
        if place.capacity_bytes:
            used_bytes = sum(self.entries[name].size_bytes for name in place.desired)
            lacking_bytes = used_bytes + entry.size_bytes - place.capacity_bytes
        if lacking <= 0 and lacking_bytes <= 0:
            return []
        movable = [
            name
            for name, since_s in place.desired.items()
            if since_s is not None and now_s - since_s >= STAY_S and self._may_leave(self.entries[name])
        ]
        victims: list[str] = []
        for name in sorted(movable, key=lambda name: (self._score(name, now_s), place.desired[name] or 0.0)):
            victims.append(name)
            lacking_bytes -= self.entries[name].size_bytes
            if len(victims) >= lacking and lacking_bytes <= 0:
                return victims
        return None

    def _may_leave(self, entry: Entry) -> bool:
        if entry.placement is not Placement.ON_DEMAND or entry.pinned:
            return False
        return entry.replicas == 1 or len(self.holders(entry.name)) > entry.replicas

    def _score(self, name: str, now_s: float) -> float:
        count, at_s = self._uses.get(name, (0.0, now_s))
        return float(count * 0.5 ** ((now_s - at_s) / HALF_LIFE_S))
