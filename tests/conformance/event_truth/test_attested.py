"""Engines whose events we can't compute are routed by load only and say why, with both values; others are exact."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import BlockStored

from router.decision import Reason, RouteRequest
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ids import LoraId
from router.ingest import SourceState
from tests.conformance import trees
from tests.conformance.event_truth.engine import ADAPTERS, PAGE, TruthEngine
from tests.conformance.event_truth.fleet import TruthFleet, TruthWorker, eventually

P = list(range(100, 124))
"""Six pages."""
Q = list(range(200, 216))
R = list(range(300, 316))


def text(block_hash: int) -> str:
    """As faults show a hash."""
    return f"{block_hash % (1 << 64):016x}"


def first_hash(tokens: list[int], *, lora_id: str | None = None, salt: str | None = None, dynamo: bool = True) -> int:
    lora = None if lora_id is None else LoraId(lora_id)
    namespace = Namespace.of(extra_key=None, lora_id=lora, cache_salt=salt, dynamo=dynamo)
    return block_hashes(tokens, PAGE, namespace)[0]


async def heard(fleet: TruthFleet, worker: TruthWorker) -> SourceState:
    """Until the router has all that the worker's engine has published, whatever it thinks of it."""
    [source], [engine] = worker.sources, worker.engines
    await eventually(lambda: fleet.core.ingest.cursor(source).next_seq == engine.published, what=f"{source} is heard")
    return fleet.core.ingest.state(source)


async def set_aside(fleet: TruthFleet, worker: TruthWorker, *prompts: list[int]) -> str:
    """Until the worker is routed by load only; returns why."""
    [source] = worker.sources
    await eventually(lambda: fleet.core.ingest.state(source) is SourceState.UNVERIFIED, what="it is set aside")
    for tokens in prompts:
        for names in ({}, {"adapter": "ad-a"}, {"salt": "s"}):
            assert fleet.predicted(tokens, **names)[worker.worker_id] is None
    others = {name for name in fleet.workers if name != worker.worker_id}
    decision = fleet.core.route(RouteRequest(packed_tokens=pack_tokens(P), exclude=others))
    assert (decision.source, decision.reason) == (source, Reason.UNVERIFIED)
    assert (decision.predicted_cached_tokens, decision.uncached_tokens) == (None, len(P))
    return fleet.core.ingest.fault(source)


# -- page size and token form ------------------------------------------------------------------------------------


async def test_another_page_size_than_reported_is_load_only_and_its_neighbour_is_exact() -> None:
    wrong, right = TruthEngine(page_size=8), TruthEngine(page_size=8, dp_rank=1)
    w0, w1 = TruthWorker("w0", [wrong], page_size=4), TruthWorker("w1", [right])
    async with TruthFleet(w0, w1) as fleet:
        for engine in (wrong, right):
            engine.store(P)
        fault = await set_aside(fleet, w0, P, Q)
        assert fault == "its events say page size 8, it was registered with 4"
        await heard(fleet, w1)
        assert fleet.predicted(P) == {"w0": None, "w1": right.cached(P)} == {"w0": None, "w1": 24}
        wrong.store(Q)
        assert await heard(fleet, w0) is SourceState.UNVERIFIED


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "tokens"])
async def test_pairs_where_tokens_were_reported_and_the_other_way_round_are_load_only(pairs: bool) -> None:
    engine = TruthEngine(bigram=pairs)
    worker = TruthWorker("w0", [engine], bigram=not pairs)
    forms = {True: "pairs of token ids", False: "single token ids"}
    async with TruthFleet(worker) as fleet:
        assert fleet.assert_true(P) == [{"w0": 0}]
        engine.store(P)
        fault = await set_aside(fleet, worker, P)
        assert fault == f"its events hold {forms[pairs]}, it was registered with {forms[not pairs]}"


async def test_page_sizes_and_token_forms_mix_in_a_fleet() -> None:
    engines = [
        TruthEngine(page_size=4),
        TruthEngine(page_size=8, dp_rank=1),
        TruthEngine(page_size=1, dp_rank=2),
        TruthEngine(page_size=4, dp_rank=3, bigram=True),
    ]
    async with TruthFleet(*(TruthWorker(f"w{i}", [engine]) for i, engine in enumerate(engines))) as fleet:
        for engine in engines:
            engine.store(Q)
            engine.store(P[:13])
            engine.store(P)
            engine.store(P[:13], adapter="ad-a")
            engine.store(P[:20], salt="s")
        await fleet.settle()
        assert fleet.assert_true(P[:13], adapter="ad-a") == [{"w0": 12, "w1": 8, "w2": 13, "w3": 12}]
        assert fleet.assert_true(P[:23], P[:9]) == [
            {"w0": 20, "w1": 16, "w2": 23, "w3": 20},
            {"w0": 8, "w1": 8, "w2": 9, "w3": 8},
        ]
        fleet.assert_true(*(P[:length] for length in range(25)), [*P[:13], *Q], salt="s")
        for engine in engines:
            engine.evict(28)
        await fleet.settle()
        for names in ({}, {"adapter": "ad-a"}, {"salt": "s"}):
            fleet.assert_true(*(P[:length] for length in range(25)), Q, **names)


# -- format ------------------------------------------------------------------------------------------------------


async def test_salted_blocks_in_default_format_where_dynamo_was_reported_are_load_only() -> None:
    engine = TruthEngine(dynamo=False)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(P, salt="s")
        fault = await set_aside(fleet, worker, P)
        published, ours = first_hash(P, salt="s", dynamo=False), first_hash(P, salt="s")
        assert f"{text(published)} of a block of the base model isn't namespaced, {text(ours)} would be" in fault
        assert 'set "format": "dynamo"' in fault


async def test_base_blocks_in_default_format_are_exact_until_an_adapters_block_shows_the_format() -> None:
    engine = TruthEngine(dynamo=False)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(Q)
        await fleet.settle()
        assert fleet.assert_true(Q, P) == [{"w0": 16}, {"w0": 0}]
        engine.tree.insert(trees.Prompt(tuple(P), ADAPTERS["ad-a"]))
        [event] = engine.tree.take_events()  # without a name it would be the base model's in every respect
        engine.publish([msgspec.structs.replace(event, lora_name="ad-a")])
        fault = await set_aside(fleet, worker, P, Q)
        published, ours = text(event.block_hashes[0]), text(first_hash(P, lora_id=ADAPTERS["ad-a"]))
        assert f"{published} of a block of adapter 'ad-a' ({ADAPTERS['ad-a']}) isn't namespaced, {ours} would" in fault


async def test_a_base_block_that_both_formats_hash_alike_settles_no_format() -> None:
    engine = TruthEngine(dynamo=False)
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.store(Q)
        await fleet.settle()
        for start in range(4):
            engine.store([start, *P], salt="s")
        state = await heard(fleet, worker)
        told = [fleet.predicted([start, *P], salt="s")["w0"] for start in range(4)]
        assert (state, told) == (SourceState.UNVERIFIED, [None] * 4)


async def test_a_default_format_that_is_reported_is_exact_without_adapters_and_extra_keys() -> None:
    engine = TruthEngine(dynamo=False)
    worker = TruthWorker("w0", [engine], dynamo_format=False)
    async with TruthFleet(worker, adapters={}) as fleet:
        engine.store(Q)
        engine.store(P[:12], salt="s")
        engine.store(P[:20], salt="t")
        await fleet.settle()
        answers = [fleet.assert_true(P, Q, **names) for names in ({}, {"salt": "s"}, {"salt": "t"})]
        assert answers == [[{"w0": base}, {"w0": other}] for base, other in ((0, 16), (12, 0), (20, 0))]
        assert fleet.predicted(P, adapter="ad-a") == fleet.predicted(P, extra="x") == {"w0": None}


async def test_in_default_format_base_prompts_are_not_promised_what_an_extra_keys_request_stored() -> None:
    engine = TruthEngine(dynamo=False)
    worker = TruthWorker("w0", [engine], dynamo_format=False)
    async with TruthFleet(worker) as fleet:
        engine.store(Q)
        fleet.core.route(RouteRequest(packed_tokens=pack_tokens(P), extra_key="x"))
        engine.store(P, extra="x")
        await heard(fleet, worker)
        assert engine.cached(P) == 0
        assert fleet.predicted(P)["w0"] in (0, None)


# -- hashes and faults -------------------------------------------------------------------------------------------


def foreign(tokens: list[int], block_hash: int) -> Any:
    """A root block whose hash isn't made as we make it."""
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=None,
        token_ids=tokens[:PAGE],
        block_size=PAGE,
        lora_id=None,
        medium="GPU",
    )


async def test_hashes_that_nothing_explains_are_load_only_from_the_third_page_until_one_is_ours() -> None:
    engine = TruthEngine()
    worker = TruthWorker("w0", [engine])
    async with TruthFleet(worker) as fleet:
        engine.publish([foreign(Q, -5), foreign(R, 6), foreign(R, 6)])
        assert await heard(fleet, worker) is SourceState.EXACT
        engine.publish([foreign(P, 7)])
        fault = await set_aside(fleet, worker, P)
        assert f"is {text(7)}, ours {text(first_hash(P))}, at page size {PAGE}: another SGLang?" in fault
        engine.store(P)
        await fleet.settle()
        assert fleet.assert_true(P, Q, R) == [{"w0": 24}, {"w0": 0}, {"w0": 0}]
        assert fleet.core.ingest.fault(worker.sources[0]) == ""


async def test_what_a_worker_finds_out_about_its_engine_condemns_that_life_and_no_other_worker() -> None:
    engines = [TruthEngine(), TruthEngine(dp_rank=1)]
    w0, w1 = (TruthWorker(f"w{i}", [engine]) for i, engine in enumerate(engines))
    async with TruthFleet(w0, w1) as fleet:
        for engine in engines:
            engine.store(P)
        await fleet.settle()
        assert fleet.assert_true(P) == [{"w0": 24, "w1": 24}]
        w0._facts["fault"] = "its first hash is 0a, ours 0b"
        assert await set_aside(fleet, w0, P) == "its first hash is 0a, ours 0b"
        del w0._facts["fault"]
        for engine in engines:
            engine.store(Q)
        assert (await heard(fleet, w0), await heard(fleet, w1)) == (SourceState.UNVERIFIED, SourceState.EXACT)
        assert fleet.predicted(Q) == {"w0": None, "w1": 16}
        await w0.restart()
        await fleet.known()
        engines[0].store(P[:8])
        await fleet.settle()
        assert fleet.assert_true(P, Q) == [{"w0": 8, "w1": 24}, {"w0": 0, "w1": 16}]
