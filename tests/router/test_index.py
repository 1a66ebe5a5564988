"""The block index counts what each source holds in each tier, and gives columns to sources."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.events import Cleared, Event, Removed, Stored, Tier
from router.hashing import Namespace, block_hashes
from router.ids import DpRank, Incarnation, SourceId, WorkerId
from router.index import BlockIndex, Tally
from router.table import as_keys


def source(worker: str, rank: int = 0) -> SourceId:
    return SourceId(WorkerId(worker), Incarnation("i1"), DpRank(rank))


W0, W1, W0R1 = source("w0"), source("w1"), source("w0", 1)


def raw(hashes: list[int]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(hashes))


def stored(*hashes: int, medium: str | None = "GPU") -> Stored:
    return Stored(raw(list(hashes)), medium)


def removed(*hashes: int, medium: str | None = "GPU") -> Removed:
    return Removed(raw(list(hashes)), medium)


BAD = Stored(msgspec.Raw(msgspec.msgpack.encode(["no hash"])), "GPU")


def index_of(*sources: SourceId) -> BlockIndex:
    index = BlockIndex()
    for one in sources:
        index.add(one)
    return index


def held(index: BlockIndex, of: SourceId, tier: Tier = Tier.GPU) -> set[int]:
    return set(index.hashes(of, tier).tolist())


def match(index: BlockIndex, hashes: list[int], *sources: SourceId) -> list[int]:
    columns = [index.add(one) for one in sources]
    depth = index.match([as_keys(hashes[:1]), as_keys(hashes[1:])], columns)
    return [int(depth[column]) for column in columns]


# -- counting ----------------------------------------------------------------------------------------------------


def test_stored_twice_and_removed_once_is_held() -> None:
    index = index_of(W0)
    assert index.apply(W0, [stored(7), stored(7)]) == Tally(repeats=1)
    assert (index.apply(W0, [removed(7)]), held(index, W0)) == (Tally(), {7})
    assert (index.apply(W0, [removed(7)]), held(index, W0)) == (Tally(), set())
    assert (index.apply(W0, [removed(7)]), held(index, W0)) == (Tally(missing=1), set())
    index.check()


def test_counts_are_per_tier_and_per_rank() -> None:
    index = index_of(W0, W0R1)
    index.apply(W0, [stored(7), stored(7), stored(7, medium="CPU_PINNED")])
    index.apply(W0R1, [stored(7)])
    index.apply(W0, [removed(7), removed(7, medium="CPU_PINNED")])
    index.apply(W0R1, [removed(7)])
    assert (held(index, W0), held(index, W0, Tier.CPU), held(index, W0R1)) == ({7}, set(), set())
    index.check()


def test_restore_counts_as_often_as_it_names_a_hash_and_replaces_the_rest() -> None:
    index = index_of(W0, W1)
    index.apply(W0, [stored(1, 1), stored(2, medium="DISK")])
    index.restore(W0, {Tier.GPU: as_keys([7, 7, -1])})
    assert index.apply(W0, [removed(7, -1), removed(1)]) == Tally(missing=1)
    assert (held(index, W0), held(index, W0, Tier.DISK)) == ({7}, set())
    index.check()


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([W0, W1]),
            st.sampled_from(["store", "store", "remove", "clear", "discard"]),
            st.sampled_from([None, "GPU", "CPU_PINNED"]),
            st.lists(st.integers(0, 4), max_size=5),
        ),
        max_size=25,
    ),
    st.integers(1, 6),
)
def test_index_is_a_counter_per_source_and_tier(steps: list[tuple[Any, ...]], batch: int) -> None:
    index = index_of(W0, W1)
    model: dict[tuple[SourceId, Tier], Counter[int]] = {(s, t): Counter() for s in (W0, W1) for t in Tier}
    expected, result = Tally(), Tally()
    events: dict[SourceId, list[Event]] = {W0: [], W1: []}

    def flush(of: SourceId) -> None:
        done = index.apply(of, events[of])
        result.repeats, result.missing = result.repeats + done.repeats, result.missing + done.missing
        result.cleared, result.bad = result.cleared + done.cleared, result.bad + done.bad
        events[of] = []

    for of, kind, medium, hashes in steps:
        counts = model[of, Tier(medium or "GPU")]
        if kind == "store":
            events[of].append(stored(*hashes, medium=medium))
            for value in hashes:
                expected.repeats += counts[value] > 0
                counts[value] += 1
        elif kind == "remove":
            events[of].append(removed(*hashes, medium=medium))
            for value in hashes:
                expected.missing += not counts[value]
                counts[value] = max(0, counts[value] - 1)
        else:
            for tier in Tier:
                model[of, tier].clear()
            if kind == "clear":
                events[of].append(Cleared())
                expected.cleared += 1
            else:
                flush(of)
                index.discard(of)
                index.add(of)
        if len(events[of]) >= batch:
            flush(of)
    flush(W0)
    flush(W1)

    assert result == expected
    assert {key: held(index, *key) for key in model} == {key: set(+counts) for key, counts in model.items()}
    for of in (W0, W1):
        any_tier = set().union(*(+model[of, tier] for tier in Tier))
        depth = next(i for i in range(6) if i not in any_tier)
        assert match(index, [0, 1, 2, 3, 4, 5], of) == [depth]
        exported = {tier: Counter(hashes.tolist()) for tier, hashes in index.export(of).items()}
        assert exported == {tier: +model[of, tier] for tier in Tier if +model[of, tier]}
        index.restore(W0, index.export(of))
        assert {tier: Counter(hashes.tolist()) for tier, hashes in index.export(W0).items()} == exported
    index.check()


# -- events ------------------------------------------------------------------------------------------------------


def test_bad_event_among_good_ones_is_counted_and_the_others_apply() -> None:
    index = index_of(W0)
    assert index.apply(W0, [stored(1), BAD, stored(2)]) == Tally(bad=1)
    assert held(index, W0) == {1, 2}
    index.check()


@pytest.mark.parametrize("held_twice", [False, True])
def test_bad_remove_among_good_ones_is_counted_and_the_others_apply(held_twice: bool) -> None:
    index = index_of(W0)
    index.apply(W0, [stored(1, 2, 3, *[3] * held_twice)])
    bad = Removed(BAD.block_hashes, "GPU")
    assert index.apply(W0, [removed(1), bad, removed(2)]) == Tally(bad=1)
    assert held(index, W0) == {3}
    index.check()


def test_unknown_tier_is_counted_and_promises_nothing() -> None:
    index = index_of(W0)
    assert index.apply(W0, [stored(1, medium="TAPE"), stored(2, medium="TAPE")]) == Tally(bad=2)
    assert match(index, [1], W0) == [0]
    index.check()


def test_one_remove_that_mixes_branches_takes_only_what_it_names() -> None:
    index = index_of(W0)
    left = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, Namespace())
    right = block_hashes([1, 2, 3, 4, 9, 9, 9, 9], 4, Namespace())
    index.apply(W0, [stored(*left), stored(right[1])])
    assert match(index, right, W0) == [2]
    index.apply(W0, [removed(right[1])])
    assert (match(index, left, W0), match(index, right, W0)) == ([2], [1])
    index.check()


def test_store_whose_parent_is_unknown_matches_once_the_parent_came() -> None:
    index = index_of(W0)
    index.apply(W0, [stored(2, 3)])
    assert match(index, [1, 2, 3], W0) == [0]
    index.apply(W0, [stored(1)])
    assert match(index, [1, 2, 3], W0) == [3]
    index.check()


# -- tiers, clear, match -----------------------------------------------------------------------------------------


def test_prefix_may_go_on_in_another_tier() -> None:
    index = index_of(W0, W1)
    index.apply(W0, [stored(1, 2), stored(2, 3, medium="CPU_PINNED"), stored(4, medium="DISK")])
    index.apply(W1, [stored(1, medium="CPU_PINNED"), stored(3)])
    assert match(index, [1, 2, 3, 4, 5], W0, W1) == [4, 1]
    index.apply(W0, [removed(1, 2)])
    assert match(index, [2, 3, 4], W0) == [3]
    index.check()


def test_clear_takes_all_tiers_of_one_source_only() -> None:
    index = index_of(W0, W0R1, W1)
    for one in (W0, W0R1, W1):
        index.apply(one, [stored(1, 1), stored(1, medium="CPU_PINNED")])
    assert index.apply(W0, [Cleared()]) == Tally(cleared=1)
    assert [index.num_blocks(one, tier) for one in (W0, W0R1, W1) for tier in (Tier.GPU, Tier.CPU)] == [
        0,
        0,
        1,
        1,
        1,
        1,
    ]
    index.apply(W0, [stored(1), removed(1)])
    assert match(index, [1], W0, W0R1, W1) == [0, 1, 1]
    index.check()


def test_events_around_a_clear_keep_their_order() -> None:
    index = index_of(W0)
    index.apply(W0, [stored(1), Cleared(), stored(2), removed(1)])
    assert held(index, W0) == {2}
    index.check()


def test_match_reads_no_further_than_anybody_holds() -> None:
    index = index_of(W0)
    index.apply(W0, [stored(1)])
    read: list[int] = []

    def pages() -> Any:
        for value in (1, 2, 3):
            read.append(value)
            yield as_keys([value])

    assert int(index.match(pages(), [0])[0]) == 1
    assert read == [1, 2]


def test_match_of_no_pages_is_zero() -> None:
    assert match(index_of(W0), [], W0) == [0]


# -- columns -----------------------------------------------------------------------------------------------------


def test_discarded_source_leaves_nothing_to_the_next_owner_of_its_column() -> None:
    index = index_of(W0, W1)
    index.apply(W0, [stored(1, 1), stored(2, medium="DISK")])
    column = index.add(W0)
    index.discard(W0)
    assert index.add(W0R1) == column
    index.apply(W0R1, [stored(1), removed(1)])
    assert match(index, [1], W0R1) == match(index, [2], W0R1) == [0]
    assert index.num_columns == 2
    index.check()


def test_adding_a_source_again_keeps_its_column_and_blocks() -> None:
    index = index_of(W0, W1)
    index.apply(W1, [stored(1)])
    assert (index.add(W1), held(index, W1)) == (1, {1})


def test_discarding_an_unknown_source_is_nothing() -> None:
    index = index_of(W0)
    index.discard(W1)
    assert index.num_columns == 1
    index.check()


def test_a_hundred_and_thirty_sources_are_told_apart_in_every_tier() -> None:
    sources = [source(f"w{n}") for n in range(130)]
    index = index_of(*sources[:3])
    index.apply(sources[0], [stored(1, medium="CPU_PINNED")])
    for one in sources:
        index.add(one)
    for n, one in enumerate(sources):
        index.apply(one, [stored(*range(n + 1)), stored(n + 1, medium="CPU_PINNED")])
    assert match(index, list(range(200)), *sources) == [n + 2 for n in range(130)]
    assert np.array_equal(index.match([], []), np.zeros(192, np.uint64))
