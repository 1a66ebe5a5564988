"""Events in all the forms they come in, and hashes that mean nothing to us (cases 4, 17).

The tree is the truth; a Counter of hashes is, where no tree can publish such a thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from router.table import as_keys
from tests.conformance import trees
from tests.conformance.event_truth.engine import ADAPTERS, PAGE, TruthEngine
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker

P = list(range(100, 124))
"""Six pages."""
Q = list(range(200, 216))
R = list(range(300, 316))


def stored(hashes: list[Any], tokens: list[int], *, parent: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=PAGE,
        lora_id=None,
        medium="GPU",
    )


def depth(fleet: TruthFleet, worker: TruthWorker, hashes: list[int]) -> int:
    """Pages that the worker's first rank holds of a prompt that has these hashes."""
    column = fleet.core.ingest.column(worker.sources[0])
    return int(fleet.core.ingest.index.match([as_keys(hashes)], [column])[column])


# -- hashes as such ----------------------------------------------------------------------------------------------


async def test_a_hash_used_again_for_other_content_counts_twice_and_goes_with_its_last_remove() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    held: Counter[int] = Counter()
    async with TruthFleet(worker) as fleet:
        engine.store(R)
        for hashes, tokens, parent, count in (
            ([77, -78], Q[:8], None, 1),
            ([77], P[:4], -78, 1),
            ([77, 79], R[:8], 80, 1),
            ([77], None, None, -1),
            ([79, 77], None, None, -1),
            ([77], None, None, -1),
            ([77], None, None, -1),
            ([77], P[4:8], None, 1),
        ):
            event = BlockRemoved(block_hashes=hashes) if tokens is None else stored(hashes, tokens, parent=parent)
            engine.publish([event])
            for value in hashes:
                held[value] = max(0, held[value] + count)
            await fleet.settle()
            assert {value: depth(fleet, worker, [value]) for value in held} == {v: min(1, n) for v, n in held.items()}
            assert fleet.assert_true(P, Q, R) == [{"w0": 0}, {"w0": 0}, {"w0": 16}]


FORMS: dict[str, Callable[[int], Any]] = {
    "signed": lambda value: value,
    "unsigned": lambda value: value % (1 << 64),
    "bytes": lambda value: value.to_bytes(8, "big", signed=True),
}


async def test_a_hash_is_the_same_in_all_its_forms_and_zero_and_negative_ones_are_like_any_other() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    hashes = [0, -1, 1, -(1 << 63), (1 << 63) - 1, -129]
    async with TruthFleet(worker) as fleet:
        engine.store(R)
        for one in FORMS.values():
            for other in FORMS.values():
                engine.publish([stored([one(value) for value in hashes], list(range(24)))])
                await fleet.settle()
                assert depth(fleet, worker, hashes) == len(hashes)
                engine.publish([BlockRemoved(block_hashes=[other(0), other(-129)], medium="GPU")])
                await fleet.settle()
                assert [depth(fleet, worker, [value]) for value in hashes] == [0, 1, 1, 1, 1, 0]
                engine.publish([BlockRemoved(block_hashes=[other(value) for value in hashes[1:-1]], medium="GPU")])
                await fleet.settle()
                assert not any(depth(fleet, worker, [value]) for value in hashes)
        assert fleet.core.ingest.stats(worker.sources[0]).missing == 0


# -- events as such ----------------------------------------------------------------------------------------------


def as_array(event: Any) -> list[Any]:
    match event:
        case BlockStored():
            fields = (event.parent_block_hash, event.token_ids, event.block_size, event.lora_id, event.medium)
            return ["BlockStored", event.block_hashes, *fields]
        case BlockRemoved():
            return ["BlockRemoved", event.block_hashes]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


EVENT_FORMS: dict[str, Callable[[Any], Any]] = {
    "sglang": lambda event: event,
    "array": as_array,
    "unknown": lambda event: {**msgspec.to_builtins(event), "colour": {"a": [1]}},
    "bare": lambda event: {k: v for k, v in msgspec.to_builtins(event).items() if k in ("type", "block_hashes")},
}


async def test_events_mean_the_same_as_arrays_and_maps_and_a_bad_one_takes_no_other_with_it() -> None:
    engines = [TruthEngine(dp_rank=i) for i in range(len(EVENT_FORMS))]
    workers = [TruthWorker(form, [engine]) for form, engine in zip(EVENT_FORMS, engines, strict=True)]
    base, adapter = (lambda tokens, key=key: trees.Prompt(tuple(tokens), key) for key in (None, ADAPTERS["ad-a"]))
    steps: list[tuple[Callable[[trees.Tree], Any], Any]] = [
        (lambda tree: (tree.insert(base(Q)), tree.clear(), tree.insert(base(R))), 17),
        (lambda tree: (tree.insert(base(P[:8])), tree.insert(base(Q))), {"type": "BlockStored"}),
        (lambda tree: (tree.insert(adapter(P)), tree.insert(base(P))), {"type": "BlockStored", "block_hashes": ["x"]}),
        (lambda tree: (tree.evict(16), tree.insert(adapter(Q))), ["Moved", [1]]),
        (lambda tree: tree.evict(20), []),
    ]
    async with TruthFleet(*workers) as fleet:
        for engine, form in zip(engines, EVENT_FORMS.values(), strict=True):
            engine.store(Q)  # by which all are attested
            for step, bad in steps:
                step(engine.tree)
                first, *rest = [form(event) for event in engine.tree.take_events()]
                engine.publish([first, bad, *rest])
        await fleet.settle()
        assert fleet.assert_true(P, Q, R) == [dict.fromkeys(EVENT_FORMS, cached) for cached in (24, 0, 0)]
        assert fleet.assert_true(P, Q, adapter="ad-a") == [dict.fromkeys(EVENT_FORMS, cached) for cached in (0, 16)]
        stats = [fleet.core.ingest.stats(worker.sources[0]) for worker in workers]
        assert [(one.bad, one.missing, one.repeats) for one in stats] == [(len(steps), 0, 0)] * len(workers)
