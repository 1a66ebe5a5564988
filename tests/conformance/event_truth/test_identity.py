"""Whose blocks they are: branches, adapters and their reloads, salts, extra keys, pairs (cases 7, 8, 11-16)."""

from __future__ import annotations

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored

from router.decision import RouteRequest
from router.hashing import pack_tokens
from router.ingest import SourceState
from tests.conformance import trees
from tests.conformance.event_truth.engine import ADAPTERS, PAGE, TruthEngine
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker, eventually

P = list(range(100, 124))
"""Six pages."""
Q = list(range(200, 216))
R = list(range(300, 316))
OLD, NEW = ADAPTERS["ad-a"], "c" * 32
"""Two loads under the name ad-a."""


# -- branches ----------------------------------------------------------------------------------------------------


async def test_a_branch_matches_past_the_split_and_one_remove_of_both_takes_only_what_it_names() -> None:
    trunk, branch = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9]
    engines = [TruthEngine(kind=kind, dp_rank=i) for i, kind in enumerate(trees.KINDS)]
    workers = [TruthWorker(kind, [engine]) for kind, engine in zip(trees.KINDS, engines, strict=True)]
    async with TruthFleet(*workers) as fleet:
        for engine in engines:
            engine.store(trunk)
            engine.store(branch)
        await fleet.settle()
        assert fleet.assert_true(trunk, branch) == [dict.fromkeys(trees.KINDS, 8)] * 2
        for engine in engines:
            engine.tree.evict(8)
            [removed] = events = engine.tree.take_events()
            assert (type(removed), len(removed.block_hashes)) == (BlockRemoved, 2)
            engine.publish(events)
        await fleet.settle()
        assert fleet.assert_true(trunk, branch) == [dict.fromkeys(trees.KINDS, 4)] * 2


async def test_a_store_whose_parent_is_unknown_matches_once_the_parent_is_there() -> None:
    engine = TruthEngine()
    async with TruthFleet(TruthWorker("w0", [engine])) as fleet:
        engine.store(Q)
        engine.tree.insert(trees.Prompt(tuple(P[:8])))
        parent = engine.tree.take_events()
        engine.tree.insert(trees.Prompt(tuple(P)))
        child = engine.tree.take_events()
        assert child[0].parent_block_hash == parent[-1].block_hashes[-1]
        engine.publish(child)
        await fleet.settle()
        assert (fleet.predicted(P), fleet.predicted(P[8:])) == ({"w0": 0}, {"w0": 0})
        engine.publish(parent)
        await fleet.settle()
        assert fleet.assert_true(P, P[8:]) == [{"w0": 24}, {"w0": 0}]


# -- adapters ----------------------------------------------------------------------------------------------------


async def test_an_adapters_blocks_are_its_own_on_every_worker_that_holds_it() -> None:
    engines = [TruthEngine(dp_rank=i) for i in range(3)]
    async with TruthFleet(*(TruthWorker(f"w{i}", [engine]) for i, engine in enumerate(engines))) as fleet:
        engines[0].store(P, adapter="ad-a")
        engines[1].store(P[:16], adapter="ad-a")
        engines[1].store(P[:8])
        engines[2].store(P[:4], adapter="ad-b")
        await fleet.settle()
        assert fleet.assert_true(P, adapter="ad-a") == [{"w0": 24, "w1": 16, "w2": 0}]
        assert fleet.assert_true(P, adapter="ad-b") == [{"w0": 0, "w1": 0, "w2": 4}]
        assert fleet.assert_true(P) == [{"w0": 0, "w1": 8, "w2": 0}]


async def test_other_files_under_a_name_start_cold_and_the_first_ones_are_as_warm_as_they_still_are() -> None:
    engine = TruthEngine(lora_names={OLD: "ad-a", NEW: "ad-a"})
    late = [*P[:12], 7, 7, 7, 7]
    async with TruthFleet(TruthWorker("w0", [engine])) as fleet:

        def same(tokens: list[int], lora_id: str) -> int:
            truth = fleet.truth(tokens, adapter=lora_id)
            assert fleet.predicted(tokens, adapter="ad-a") == truth
            return truth["w0"]

        engine.store(P[:12], adapter=OLD)
        engine.store(P, adapter=OLD)
        await fleet.settle()
        assert same(P, OLD) == 24
        fleet.load({"ad-a": NEW})
        assert same(P, NEW) == 0
        engine.store(late, adapter=OLD)
        await fleet.settle()
        assert (same(P, NEW), same(late, NEW)) == (0, 0)
        engine.store(P[:12], adapter=NEW)
        await fleet.settle()
        assert (same(P, NEW), same(late, NEW)) == (12, 12)
        engine.evict(4)  # the oldest leaf: the first files' last three pages
        await fleet.settle()
        assert same(P, NEW) == 12
        engine.store(P[:20], adapter=NEW)
        await fleet.settle()
        assert same(P, NEW) == 20
        fleet.load({"ad-a": OLD})
        assert (same(P, OLD), same(late, OLD)) == (12, 16)
        assert fleet.assert_true(P) == [{"w0": 0}]


async def test_blocks_of_an_adapter_that_come_without_its_name_are_never_the_base_models() -> None:
    engine = TruthEngine(lora_names={})
    worker = TruthWorker("w0", [engine])
    [source] = worker.sources
    prompts = [[1000 + start, *P] for start in range(8)]  # enough first pages to rouse suspicion
    async with TruthFleet(worker) as fleet:
        for tokens in prompts:
            engine.tree.insert(trees.Prompt(tuple(tokens), ADAPTERS["ad-a"]))
        events = engine.tree.take_events()
        assert {event.lora_name for event in events if isinstance(event, BlockStored)} == {None}
        engine.publish(events)
        await eventually(
            lambda: fleet.core.ingest.cursor(source).next_seq == engine.published, what="the router has all"
        )
        assert fleet.core.ingest.state(source) is SourceState.EXACT
        assert [answer["w0"] for answer in fleet.assert_true(*prompts)] == [0] * 8
        assert [answer["w0"] for answer in fleet.assert_true(*prompts, adapter="ad-a")] == [24] * 8
        engine.store(prompts[0][:12])
        await fleet.settle()
        assert [answer["w0"] for answer in fleet.assert_true(*prompts)] == [12] + [0] * 7
        assert fleet.assert_true(prompts[0], adapter="ad-b") == [{"w0": 0}]


# -- salts and extra keys ----------------------------------------------------------------------------------------

APART: list[dict[str, str]] = [
    {},
    {"adapter": "ad-a"},
    {"adapter": "ad-b"},
    {"salt": "A"},
    {"salt": "B"},
    {"salt": ADAPTERS["ad-a"]},
    {"salt": "ad-a"},
    {"extra": "A"},
    {"extra": "a", "salt": "bc"},
    {"extra": "ab", "salt": "c"},
    {"extra": "abc"},
    {"salt": "abc"},
    {"adapter": "ad-a", "salt": "A"},
    {"adapter": "ad-a", "extra": "A"},
    {"adapter": "ad-b", "extra": "A"},
    {"adapter": "ad-a", "extra": "A", "salt": "A"},
]
"""No two of these share a block."""


async def test_salts_extra_keys_and_adapters_keep_apart_what_they_name() -> None:
    engine = TruthEngine()
    tokens = [*P, *Q, *R, *range(400, 408)]
    async with TruthFleet(TruthWorker("w0", [engine])) as fleet:
        for num_pages, names in enumerate(APART, start=1):
            engine.store(tokens[: PAGE * num_pages], **names)
        await fleet.settle()
        answers = [fleet.assert_true(tokens, **names) for names in APART]
        assert answers == [[{"w0": PAGE * num_pages}] for num_pages in range(1, len(APART) + 1)]


async def test_extra_key_and_lora_id_are_joined_as_sglang_joins_them() -> None:
    engine = TruthEngine()
    async with TruthFleet(TruthWorker("w0", [engine])) as fleet:
        engine.store(R)
        engine.store(P, adapter="ad-a", extra="q")
        engine.store(Q, extra=ADAPTERS["ad-b"])
        engine.store(R, salt="")
        await fleet.settle()
        assert fleet.assert_true(P, extra="q" + ADAPTERS["ad-a"]) == [{"w0": 24}]
        assert fleet.assert_true(Q, adapter="ad-b") == [{"w0": 16}]
        assert fleet.assert_true(R, extra="", salt="") == [{"w0": 16}]
        assert fleet.assert_true(P, Q, adapter="ad-a") == [{"w0": 0}, {"w0": 0}]


# -- pairs -------------------------------------------------------------------------------------------------------


async def test_pairs_need_one_token_more_than_pages_hold() -> None:
    engine = TruthEngine(bigram=True)
    tokens = list(range(1, 10))
    async with TruthFleet(TruthWorker("w0", [engine])) as fleet:
        engine.store(tokens)
        engine.store(tokens, adapter="ad-a", salt="s")
        await fleet.settle()
        assert fleet.assert_true(tokens, tokens[:8], [*tokens[:8], 77]) == [{"w0": 8}, {"w0": 4}, {"w0": 4}]
        assert fleet.assert_true(tokens, adapter="ad-a", salt="s") == [{"w0": 8}]
        engine.evict(8)
        await fleet.settle()
        fleet.assert_true(tokens, tokens[:8])


@pytest.mark.parametrize("bigram", [False, True], ids=["tokens", "pairs"])
async def test_the_last_token_of_a_prompt_is_computed_and_so_is_the_pair_it_ends(bigram: bool) -> None:
    engine = TruthEngine(bigram=bigram)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store([*P, *Q])
        await fleet.settle()
        lengths = range(2, 20)
        predicted = [
            fleet.core.predict(worker.sources[0], RouteRequest(packed_tokens=pack_tokens(P[:length])))
            for length in lengths
        ]
        asked = [engine.cached(P[: length - 1]) for length in lengths]  # Req: RadixKey(tokens, limit=len - 1)
        assert dict(zip(lengths, predicted, strict=True)) == dict(zip(lengths, asked, strict=True))
