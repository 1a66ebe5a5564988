"""The prompt hasher gives block_hashes, page for page, and hashes no page that nobody asks for or that it remembers."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import prompt as prompt_module
from router.hashing import HASH_BYTES, Namespace, PageHashes, block_hashes, hash_pages, pack_tokens
from router.prompt import CHUNK_TOKENS, PromptHasher
from router.table import as_keys

NAMESPACES = [Namespace(), Namespace("a" * 32), Namespace(None, "s"), Namespace("k", "s"), Namespace(None, "s", False)]


def all_pages(hasher: PromptHasher, tokens: list[int], namespace: Namespace, num_pages: int | None = None) -> list[int]:
    packed = pack_tokens(tokens)
    num_pages = hasher.num_pages(packed) if num_pages is None else num_pages
    return [int(key) for keys in hasher.pages(packed, namespace, num_pages=num_pages) for key in keys]


@pytest.fixture
def hashed_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pages of each call of the real hash_pages, as they are made."""
    counts: list[int] = []

    def counting(packed: bytes, page_bytes: int, *, digest: bytes, seed: bytes | None) -> PageHashes:
        pages = hash_pages(packed, page_bytes, digest=digest, seed=seed)
        counts.append(len(pages.packed) // HASH_BYTES)
        return pages

    monkeypatch.setattr(prompt_module, "hash_pages", counting)
    return counts


#: prompts that begin alike, around the borders of chunks and pages
PROMPTS = st.builds(
    lambda length, fork, other: [7] * min(fork, length) + [other] * max(0, length - fork),
    st.one_of(st.integers(0, 70), st.integers(CHUNK_TOKENS - 2, CHUNK_TOKENS + 2), st.integers(0, 3 * CHUNK_TOKENS)),
    st.one_of(st.integers(0, 70), st.integers(CHUNK_TOKENS - 2, CHUNK_TOKENS + 2), st.just(10_000)),
    st.integers(0, (1 << 32) - 1),
)


@settings(deadline=None, max_examples=120, derandomize=True, database=None)
@given(
    page_size=st.sampled_from([1, 3, 16, 64, 512]),
    bigram=st.booleans(),
    max_pages=st.sampled_from([1, 1 << 20]),
    asked=st.lists(st.tuples(PROMPTS, st.sampled_from(NAMESPACES)), min_size=1, max_size=6),
)
def test_pages_equal_block_hashes(
    page_size: int, bigram: bool, max_pages: int, asked: list[tuple[list[int], Namespace]]
) -> None:
    hasher = PromptHasher(page_size=page_size, bigram=bigram, max_pages=max_pages)
    for tokens, namespace in asked:
        expected = as_keys(block_hashes(tokens, page_size, namespace, bigram=bigram)).tolist()
        assert hasher.num_pages(pack_tokens(tokens)) == len(expected)
        assert all_pages(hasher, tokens, namespace) == expected
        half = len(expected) // 2
        assert all_pages(hasher, tokens, namespace, half) == expected[:half]


@pytest.mark.parametrize(
    ("num_tokens", "bigram", "num_pages"), [(9, True, 2), (8, True, 1), (0, True, 0), (8, False, 2), (3, False, 0)]
)
def test_pairs_need_one_token_more(num_tokens: int, bigram: bool, num_pages: int) -> None:
    hasher = PromptHasher(page_size=4, bigram=bigram)
    assert hasher.num_pages(pack_tokens(range(num_tokens))) == num_pages


def test_nothing_is_hashed_past_where_the_reader_stops(hashed_pages: list[int]) -> None:
    hasher = PromptHasher(page_size=16)
    packed = pack_tokens(range(64 * CHUNK_TOKENS))
    read = list(islice(hasher.pages(packed, Namespace(), num_pages=hasher.num_pages(packed)), 2))
    assert [len(keys) for keys in read] == hashed_pages == [CHUNK_TOKENS // 16] * 2


def test_nothing_is_hashed_before_anybody_reads(hashed_pages: list[int]) -> None:
    packed = pack_tokens(range(64))
    PromptHasher(page_size=16).pages(packed, Namespace(), num_pages=4)
    assert hashed_pages == []


def test_prefix_seen_before_is_not_hashed_again(hashed_pages: list[int]) -> None:
    hasher = PromptHasher(page_size=16)
    shared = list(range(4 * CHUNK_TOKENS))
    first = all_pages(hasher, [*shared, *[1] * CHUNK_TOKENS], Namespace())
    hashed_pages.clear()
    second = all_pages(hasher, [*shared, *[2] * CHUNK_TOKENS], Namespace())
    assert hashed_pages == [CHUNK_TOKENS // 16]
    assert first[:64] == second[:64]
    assert not set(first[64:]) & set(second[64:])


def test_what_is_remembered_comes_at_once(hashed_pages: list[int]) -> None:
    hasher = PromptHasher(page_size=16)
    tokens = list(range(4 * CHUNK_TOKENS))
    all_pages(hasher, tokens, Namespace())
    hashed_pages.clear()
    (keys,) = hasher.pages(pack_tokens(tokens), Namespace(), num_pages=64)
    assert (len(keys), keys.dtype, hashed_pages) == (64, np.uint64, [])


def test_namespaces_do_not_remember_for_each_other(hashed_pages: list[int]) -> None:
    hasher = PromptHasher(page_size=16)
    hashes = [tuple(all_pages(hasher, list(range(16)), namespace)) for namespace in NAMESPACES]
    assert (len(set(hashes)), hashed_pages) == (len(NAMESPACES), [1] * len(NAMESPACES))


def test_memory_of_hashes_is_bounded_and_keeps_what_is_asked_for(hashed_pages: list[int]) -> None:
    hasher = PromptHasher(page_size=16, max_pages=16 * CHUNK_TOKENS // 16)  # two generations of eight chunks
    hot = [0] * CHUNK_TOKENS
    all_pages(hasher, hot, Namespace())
    for n in range(1, 100):
        all_pages(hasher, [n] * CHUNK_TOKENS, Namespace())
        all_pages(hasher, hot, Namespace())
    assert len(hashed_pages) == 100
    all_pages(hasher, [1] * CHUNK_TOKENS, Namespace())
    assert len(hashed_pages) == 101


@pytest.mark.parametrize("page_size", [0, -1])
def test_page_size_below_one_is_refused(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size must be at least 1, got {page_size}"):
        PromptHasher(page_size=page_size)
