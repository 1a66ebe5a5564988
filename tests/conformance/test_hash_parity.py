"""The promise at its root: our hashes and our index say of every prompt what SGLang's own trees say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RouterCore
from router.cost import CostWeights
from router.cursor import SeqPayload
from router.decision import RouteRequest
from router.events import decode_batch
from router.hashing import Namespace, block_hashes, pack_tokens
from router.ids import DpRank, Incarnation, LoraId, SourceId, WorkerId
from router.index import BlockIndex, Tally
from router.prompt import PromptHasher
from router.reports import AdapterState, Holding, RankReport, TableView, WorkerReport, WorkerState
from tests.conformance import trees
from tests.conformance.trees import Prompt, Tree

GOLDEN = json.loads((Path(__file__).parent / "golden" / "sglang-0.5.23.json").read_text())
ADAPTER_A = LoraId("a" * 32)
ADAPTER_B = LoraId("b" * 32)
UNNAMED = "c" * 32
"""An adapter's id that the engine's name table lacks."""
LORA_NAMES: dict[str, str] = {ADAPTER_A: "ad-a", ADAPTER_B: "ad-b"}
LORA_IDS = {name: LoraId(lora_id) for lora_id, name in LORA_NAMES.items()}
SOURCE = SourceId(WorkerId("w0"), Incarnation("i1"), DpRank(0))

all_trees = pytest.mark.parametrize("kind", trees.KINDS)


def unsigned(hashes: list[int]) -> set[int]:
    return {value % (1 << 64) for value in hashes}


# -- golden bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vector", "namespace"),
    [
        ("base", Namespace()),
        ("lora_id_1", Namespace("1".zfill(32))),
        ("lora_id_2_same_name", Namespace("2".zfill(32))),
        ("extra_user+lora", Namespace("tenantA" + "1".zfill(32))),
        ("salt_only", Namespace(None, "tenantA")),
        ("lora_and_salt", Namespace("1".zfill(32), "tenantA")),
        ("empty_salt", Namespace(None, "")),
    ],
)
def test_hashes_equal_the_golden_vector(vector: str, namespace: Namespace) -> None:
    assert block_hashes(GOLDEN["tokens"], GOLDEN["page_size"], namespace) == GOLDEN[vector]


def test_golden_batch_stores_then_clears() -> None:
    batch = decode_batch(bytes.fromhex(GOLDEN["batch_hex"]))
    assert msgpack.unpackb(bytes.fromhex(GOLDEN["batch_hex"])) == GOLDEN["batch_decoded"]
    index = BlockIndex()
    index.add(SOURCE)

    stored = index.apply(SOURCE, batch.events[:1])
    assert (batch.ts, batch.dp_rank, batch.num_bad, len(batch.events)) == (1.5, 1, 0, 3)
    assert (stored, set(index.hashes(SOURCE).tolist())) == (Tally(), unsigned(GOLDEN["lora_id_1"]))

    assert index.apply(SOURCE, batch.events[1:]) == Tally(missing=1, cleared=1)
    assert index.num_blocks(SOURCE) == 0
    index.check()


@pytest.mark.parametrize("vector", ["bigram_store_decoded", "minimal_store_decoded"])
def test_golden_store_is_applied(vector: str) -> None:
    batch = decode_batch(msgpack.packb(GOLDEN[vector]))
    index = BlockIndex()
    index.add(SOURCE)

    assert (batch.num_bad, index.apply(SOURCE, batch.events)) == (0, Tally())
    assert set(index.hashes(SOURCE).tolist()) == unsigned(GOLDEN[vector][1][0]["block_hashes"])
    index.check()


# -- random lives of a cache -------------------------------------------------------------------------------------


def as_prompt(request: RouteRequest) -> Prompt:
    """The request as SGLang hands it to the tree: GenerateReqInput makes None of empty keys, Req joins the adapter."""
    extra_key = request.extra_key
    if request.adapter is not None:
        extra_key = (extra_key or "") + LORA_IDS[request.adapter]
    tokens = tuple(memoryview(request.packed_tokens or b"").cast("I"))
    return Prompt(tokens, extra_key or None, request.cache_salt or None)


class Twin:
    """A RouterCore that hears everything one tree publishes, and is held against it."""

    def __init__(self, tree: Tree, *, dynamo: bool, bigram: bool) -> None:
        self.tree = tree
        self.core = RouterCore(CostWeights(), rng=random.Random(0))
        self._hasher = PromptHasher(page_size=tree.page_size, bigram=bigram)
        self._dynamo = dynamo
        self._seq = 0
        self.core.report(
            WorkerReport(
                worker_id=SOURCE.worker_id,
                incarnation=SOURCE.incarnation,
                state=WorkerState.READY,
                ranks=(RankReport(dp_rank=SOURCE.dp_rank, endpoint="tcp://w0:1"),),
                page_size=tree.page_size,
                dynamo_format=dynamo,
                bigram=bigram,
            )
        )
        holdings = tuple(
            Holding(
                worker_id=SOURCE.worker_id,
                incarnation=SOURCE.incarnation,
                lora_id=lora_id,
                name=name,
                content_id=name,
                state=AdapterState.LOADED,
            )
            for name, lora_id in (LORA_IDS.items() if dynamo else ())  # the default format can't tell whose a block is
        )
        self.core.update_table(TableView(epoch="e", version=0, names=tuple(LORA_IDS), holdings=holdings))
        assert self.core.ingest.replayed(SOURCE, [], now_s=1.0) == []

    def hear(self) -> None:
        """Take what the tree has published."""
        assert self.core.ingest.live(SOURCE, SeqPayload(self._seq, self.tree.publish()), now_s=1.0) == []
        self._seq += 1

    def same_blocks(self) -> None:
        stats = self.core.ingest.stats(SOURCE)
        assert set(self.core.ingest.index.hashes(SOURCE).tolist()) == self.tree.held()
        assert (stats.bad, stats.missing, stats.repeats) == (0, 0, 0)

    def same_answer(self, request: RouteRequest) -> None:
        packed = request.packed_tokens or b""
        lora_id = None if request.adapter is None else LORA_IDS[request.adapter]
        namespace = Namespace.of(
            extra_key=request.extra_key, lora_id=lora_id, cache_salt=request.cache_salt, dynamo=self._dynamo
        )
        pages = self._hasher.pages(packed, namespace, num_pages=self._hasher.num_pages(packed))
        column = self.core.ingest.column(SOURCE)
        found = int(self.core.ingest.index.match(pages, [column])[column])
        (candidate,) = self.core.explain(request)

        prompt = as_prompt(request)
        cached = self.tree.match(prompt)
        page_size = self.tree.page_size
        assert found * page_size == cached
        reusable = self.tree.match(replace(prompt, tokens=prompt.tokens[:-1]))  # the last token is always computed
        assert candidate.predicted_cached_tokens == reusable


def prompt_tokens(page_size: int) -> st.SearchStrategy[bytes]:
    """Prompts over three kinds of page that differ in their first or last token, and a rest of a page."""
    page = st.sampled_from([(1,) * page_size, (1,) * (page_size - 1) + (2,), (3,) + (1,) * (page_size - 1)])
    rest = st.integers(0, page_size - 1).map(lambda n: (1,) * n)
    return st.tuples(st.lists(page, max_size=5), rest).map(lambda parts: pack_tokens([*sum(parts[0], ()), *parts[1]]))


SALTS = st.sampled_from([None, "s", "t", ""])
NAMESPACES = st.one_of(
    st.builds(dict, cache_salt=SALTS),
    st.builds(
        dict,
        adapter=st.sampled_from([None, "ad-a", "ad-b"]),
        extra_key=st.sampled_from([None, "k", "", "s", UNNAMED]),
        cache_salt=SALTS,
    ),
)


@st.composite
def lives(draw: st.DrawFn, page_size: int, namespaces: st.SearchStrategy[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Steps of a cache's life in a few namespaces: mostly inserts and lookups, which split nodes."""
    spaces = st.sampled_from(draw(st.lists(namespaces, min_size=1, max_size=3)))
    requests = st.builds(
        lambda packed, space: RouteRequest(packed_tokens=packed, **space), prompt_tokens(page_size), spaces
    )
    step = st.one_of(
        st.tuples(st.just("insert"), requests),
        st.tuples(st.just("insert"), requests),
        st.tuples(st.just("ask"), requests),
        st.tuples(st.just("evict"), st.integers(1, 4 * page_size)),
        st.tuples(st.sampled_from(["hear", "hear", "hear", "clear"]), st.none()),
    )
    return draw(st.lists(step, min_size=4, max_size=24))


def live_through(twin: Twin, life: list[tuple[str, Any]]) -> None:
    for step, what in life:
        if step == "insert":
            twin.core.explain(what)  # a request is routed before it runs, which shows its extra_key
            twin.tree.insert(as_prompt(what))
        elif step == "evict":
            twin.tree.evict(what)
        elif step == "clear":
            twin.tree.clear()
        else:
            twin.hear()
            if step == "ask":
                twin.same_answer(what)
    twin.hear()
    twin.same_blocks()
    for request in [what for step, what in life if step in ("insert", "ask")]:
        twin.same_answer(request)
    twin.tree.evict(1 << 20)
    twin.hear()
    twin.same_blocks()
    assert twin.core.ingest.index.num_blocks(SOURCE) == 0
    twin.core.check()


@all_trees
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "default"])
def test_index_and_predictions_equal_the_tree(kind: str, page_size: int, dynamo: bool) -> None:
    namespaces = NAMESPACES if dynamo else st.builds(dict, cache_salt=SALTS)

    @settings(deadline=None, max_examples=45, derandomize=True, database=None)
    @given(lives(page_size, namespaces))
    def run(life: list[tuple[str, Any]]) -> None:
        tree = trees.build(kind, page_size=page_size, dynamo=dynamo, lora_names=LORA_NAMES)
        live_through(Twin(tree, dynamo=dynamo, bigram=False), life)

    run()


@all_trees
@pytest.mark.parametrize("page_size", [1, 4])
def test_index_and_predictions_equal_the_tree_under_speculative_decoding(kind: str, page_size: int) -> None:
    @settings(deadline=None, max_examples=45, derandomize=True, database=None)
    @given(lives(page_size, NAMESPACES))
    def run(life: list[tuple[str, Any]]) -> None:
        tree = trees.build(kind, page_size=page_size, bigram=True, lora_names=LORA_NAMES)
        live_through(Twin(tree, dynamo=True, bigram=True), life)

    run()


# -- SGLang's own examples, read by an independent decoder -------------------------------------------------------


def published(tree: Tree) -> list[dict[str, Any]]:
    return msgpack.unpackb(tree.publish())[1]


def stored(tree: Tree, prompt: Prompt) -> list[dict[str, Any]]:
    """Events of inserting the prompt into the tree."""
    tree.publish()
    tree.insert(prompt)
    return published(tree)


def removed_hashes(tree: Tree) -> list[int]:
    """Hashes that the tree takes back when everything is evicted."""
    tree.publish()
    tree.evict(1 << 20)
    events = published(tree)
    assert {event["type"] for event in events} == {"BlockRemoved"}
    return [value for event in events for value in event["block_hashes"]]


TOKENS = (1, 2, 3, 4, 5, 6, 7, 8)
BRANCH = (1, 2, 3, 4, 9, 9, 9, 9)


@all_trees
def test_stream_opens_with_a_clear(kind: str) -> None:
    assert published(trees.build(kind, page_size=4)) == [{"type": "AllBlocksCleared"}]


@all_trees
def test_base_and_adapters_share_no_hash(kind: str) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    keys = [None, ADAPTER_A, ADAPTER_B, UNNAMED]
    hashes = [value for key in keys for value in stored(tree, Prompt(TOKENS, key))[0]["block_hashes"]]
    assert len(set(hashes)) == 2 * len(keys)


@all_trees
@pytest.mark.parametrize("extra_key", [None, ADAPTER_A, "tenant" + ADAPTER_A, UNNAMED])
@pytest.mark.parametrize("salt", [None, "s"])
def test_removes_name_what_was_stored(kind: str, extra_key: str | None, salt: str | None) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    (event,) = stored(tree, Prompt(TOKENS, extra_key, salt))
    assert removed_hashes(tree) == event["block_hashes"]


@all_trees
@pytest.mark.parametrize("extra_key", [None, ADAPTER_A])
def test_parent_link_after_a_split_names_the_last_shared_page(kind: str, extra_key: str | None) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    (whole,) = stored(tree, Prompt(TOKENS, extra_key))
    (branch,) = stored(tree, Prompt(BRANCH, extra_key))
    assert whole.get("parent_block_hash") is None
    assert branch["parent_block_hash"] == whole["block_hashes"][0]
    assert branch["token_ids"] == [9, 9, 9, 9]


@all_trees
@pytest.mark.parametrize("extra_key", [None, ADAPTER_A])
def test_removes_after_a_split_name_each_page_once(kind: str, extra_key: str | None) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    events = stored(tree, Prompt(TOKENS, extra_key)) + stored(tree, Prompt(BRANCH, extra_key))
    expected = [value for event in events for value in event["block_hashes"]]
    assert len(expected) == 3
    assert sorted(removed_hashes(tree)) == sorted(expected)


@all_trees
def test_base_hashes_are_the_same_in_both_formats(kind: str) -> None:
    by_format = [
        stored(trees.build(kind, page_size=4, dynamo=dynamo), Prompt(TOKENS))[0]["block_hashes"]
        for dynamo in (True, False)
    ]
    assert by_format == [GOLDEN["base"], GOLDEN["base"]]


@all_trees
@pytest.mark.parametrize(
    ("extra_key", "name"), [(None, None), (ADAPTER_A, "ad-a"), ("tenant" + ADAPTER_B, "ad-b"), ("tenant", None)]
)
def test_lora_name_comes_from_the_end_of_the_extra_key(kind: str, extra_key: str | None, name: str | None) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    (event,) = stored(tree, Prompt(TOKENS, extra_key))
    assert event.get("lora_name") == name


@all_trees
def test_unnamed_adapter_looks_like_base_but_for_the_hash(kind: str) -> None:
    tree = trees.build(kind, page_size=4, lora_names=LORA_NAMES)
    (base,) = stored(tree, Prompt(TOKENS))
    (unnamed,) = stored(tree, Prompt(TOKENS, UNNAMED))
    assert "lora_name" not in unnamed
    assert {key for key in base if base[key] != unnamed[key]} == {"block_hashes"}


@all_trees
def test_bigram_pages_carry_pairs_and_need_one_token_more(kind: str) -> None:
    tree = trees.build(kind, page_size=4, bigram=True)
    (eight,) = stored(tree, Prompt(TOKENS))
    assert eight["token_ids"] == [list(pair) for pair in pairwise(TOKENS[:5])]
    (ninth,) = stored(tree, Prompt((*TOKENS, 9)))
    assert (len(ninth["block_hashes"]), tree.match(Prompt((*TOKENS, 9)))) == (1, 8)
