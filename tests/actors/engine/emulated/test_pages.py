"""The page cache against a naive twin, and against SGLang's own radix cache."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from actors.engine.emulated.pages import PageCache
from router.hashing import Namespace, block_hashes
from tests.actors.engine.emulated.ledger import PAGE, Ledger, hashes
from tests.conformance import trees
from tests.conformance.trees import Prompt

WHOLE = 1000 * PAGE
"""More tokens than any prompt here."""
PATHS = st.text("ab", max_size=5)
"""Prompts over two kinds of page."""


def store(cache: PageCache, pages: str) -> None:
    cache.insert(hashes(pages), len(pages) * PAGE)


def filled(*prompts: str) -> tuple[PageCache, Ledger]:
    ledger = Ledger()
    cache = ledger.cache()
    for pages in prompts:
        store(cache, pages)
    return cache, ledger


# -- a naive twin ------------------------------------------------------------------------------------------------


class PagesAgainstNaive(RuleBasedStateMachine):
    """Paths in a dict, every leaf looked at for every page given up."""

    places: Bundle[tuple[Any, str]] = Bundle("places")

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.cache = self.ledger.cache()
        #: when a path was last used
        self.used: dict[str, int] = {}
        self.locked: list[str] = []
        self.tick = 0

    def insert_some(self, path: str, num_pages: int, rest: int) -> tuple[Any, str]:
        stored = path[:num_pages]
        new = [stored[:n] for n in range(1, len(stored) + 1) if stored[:n] not in self.used]
        self.ledger.stored = []
        num_tokens, place = self.cache.insert(hashes(path), num_pages * PAGE + rest)
        assert num_tokens == len(stored) * PAGE
        assert self.ledger.stored == [hashes(one)[-1] for one in new]
        self.touch(stored)
        return place, stored

    @rule(target=places, path=PATHS, num_pages=st.integers(0, 5), rest=st.integers(0, PAGE - 1))
    def insert_and_lock(self, path: str, num_pages: int, rest: int) -> tuple[Any, str]:
        return self.lock(*self.insert_some(path, num_pages, rest))

    @rule(path=PATHS, num_pages=st.integers(0, 5), rest=st.integers(0, PAGE - 1))
    def insert(self, path: str, num_pages: int, rest: int) -> None:
        self.insert_some(path, num_pages, rest)

    @rule(target=places, path=PATHS, num_pages=st.integers(0, 5), rest=st.integers(0, PAGE - 1))
    def match_and_lock(self, path: str, num_pages: int, rest: int) -> tuple[Any, str]:
        return self.lock(*self.look_up(path, num_pages, rest))

    @rule(path=PATHS, num_pages=st.integers(0, 5), rest=st.integers(0, PAGE - 1))
    def match(self, path: str, num_pages: int, rest: int) -> None:
        self.look_up(path, num_pages, rest)

    def look_up(self, path: str, num_pages: int, rest: int) -> tuple[Any, str]:
        found = self.found(path[:num_pages])
        num_tokens, place = self.cache.match(hashes(path), num_pages * PAGE + rest)
        assert num_tokens == len(found) * PAGE
        self.touch(found)
        return place, found

    @rule(path=PATHS)
    def peek(self, path: str) -> None:
        assert self.cache.peek(hashes(path)) == len(self.found(path)) * PAGE

    @rule(place=consumes(places))
    def unlock(self, place: tuple[Any, str]) -> None:
        self.cache.unlock(place[0])
        self.locked.remove(place[1])

    @rule(num_tokens=st.integers(0, 6 * PAGE))
    def evict(self, num_tokens: int) -> None:
        free = self.cache.evictable
        self.ledger.removed = []
        expected: list[str] = []
        while len(expected) * PAGE < num_tokens and (leaves := self.leaves()):
            expected.append(min(leaves, key=lambda path: self.used[path]))
            del self.used[expected[-1]]
        self.cache.evict(num_tokens)
        gone = self.ledger.removed
        assert gone == [hashes(path)[-1] for path in expected]
        assert len(gone) * PAGE >= min(num_tokens, free)

    @invariant()
    def what_is_told_is_what_is_held(self) -> None:
        assert self.ledger.parents == {
            hashes(path)[-1]: hashes(path)[-2] if len(path) > 1 else None for path in self.used
        }

    @invariant()
    def counts_equal_a_recount(self) -> None:
        assert self.cache.held == len(self.used) * PAGE
        assert self.cache.evictable == sum(not self.is_locked(path) for path in self.used) * PAGE

    def teardown(self) -> None:
        for path in self.locked:
            assert self.cache.peek(hashes(path)) == len(path) * PAGE

    def found(self, path: str) -> str:
        return path[: max(n for n in range(len(path) + 1) if not n or path[:n] in self.used)]

    def touch(self, path: str) -> None:
        self.tick += 1
        self.used |= {path[:n]: self.tick for n in range(1, len(path) + 1)}

    def lock(self, place: Any, path: str) -> tuple[Any, str]:
        self.cache.lock(place)
        self.locked.append(path)
        return place, path

    def is_locked(self, path: str) -> bool:
        return any(one.startswith(path) for one in self.locked)

    def leaves(self) -> list[str]:
        inner = {path[:-1] for path in self.used}
        return [path for path in self.used if path not in inner and not self.is_locked(path)]


TestPagesAgainstNaive = PagesAgainstNaive.TestCase
TestPagesAgainstNaive.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40, derandomize=True, database=None
)


# -- by hand -----------------------------------------------------------------------------------------------------


def test_new_pages_are_told_with_the_page_before_and_known_ones_not_again() -> None:
    told: list[tuple[list[int], int | None]] = []
    cache = PageCache(PAGE, stored=lambda new, parent: told.append((new, parent)), removed=lambda gone: None)
    a, b, c = hashes("abc")

    cache.insert(hashes("abc"), PAGE)
    cache.insert(hashes("abc"), 3 * PAGE - 1)  # a page that isn't full isn't stored
    cache.insert(hashes("ab"), 2 * PAGE)
    cache.insert(hashes("abc"), 99 * PAGE)  # a prompt is no longer than its pages
    cache.insert(hashes(""), 3)

    assert told == [([a], None), ([b], a), ([c], b)]


def test_the_longest_unused_leaf_goes_first_and_its_parent_once_it_is_one() -> None:
    cache, ledger = filled("ab", "cd")
    cache.match(hashes("ab"), WHOLE)
    (a, b), (c, d) = hashes("ab"), hashes("cd")

    cache.evict(3 * PAGE)

    assert ledger.removed == [d, c, b]
    assert (ledger.parents, cache.held, cache.evictable) == ({a: None}, PAGE, PAGE)


def test_a_peek_leaves_no_trace() -> None:
    cache, ledger = filled("a", "b")

    assert cache.peek(hashes("ax")) == PAGE
    cache.evict(1)

    assert ledger.removed == list(hashes("a"))


def test_a_started_page_is_given_up_whole() -> None:
    cache, ledger = filled("abc")

    cache.evict(PAGE + 1)

    assert ledger.removed == [hashes("abc")[2], hashes("abc")[1]]


def test_locked_pages_stay_whatever_is_asked_and_are_free_when_all_locks_are_gone() -> None:
    cache, ledger = filled("ab", "ac", "d")
    num_tokens, place = cache.match(hashes("ab"), WHOLE)
    cache.lock(place)
    cache.lock(place)

    cache.evict(100 * PAGE)
    assert (num_tokens, cache.held, cache.evictable) == (2 * PAGE, 2 * PAGE, 0)

    cache.unlock(place)
    ledger.removed = []
    cache.evict(100 * PAGE)
    assert (ledger.removed, cache.evictable) == ([], 0)

    cache.unlock(place)
    assert cache.evictable == 2 * PAGE
    cache.evict(100 * PAGE)
    assert (ledger.removed, cache.held) == (list(hashes("ab"))[::-1], 0)


def test_a_lock_at_the_start_holds_nothing() -> None:
    cache, ledger = filled("a")
    _, place = cache.match(hashes("b"), WHOLE)

    cache.lock(place)
    assert cache.evictable == PAGE
    cache.evict(PAGE)
    cache.unlock(place)

    assert (ledger.parents, cache.held, cache.evictable) == ({}, 0, 0)


def test_a_prompt_that_comes_again_and_again_leaves_nothing_behind() -> None:
    cache, _ = filled("ab", "c")
    _, place = cache.match(hashes("ab"), WHOLE)
    tracemalloc.start()
    for _ in range(10_000):
        cache.unlock(cache.lock(place))
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert grown_bytes < 10_000


def test_a_page_that_went_and_came_back_is_new() -> None:
    cache, ledger = filled("a", "b")
    cache.evict(PAGE)
    store(cache, "a")

    cache.evict(PAGE)

    assert ledger.removed == list(hashes("b"))
    assert cache.match(hashes("a"), WHOLE)[0] == PAGE


# -- SGLang's ----------------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn, page_size: int) -> list[tuple[str, Prompt]]:
    """Inserts and lookups of prompts that fork in the middle of a page, for two adapters and none."""
    page = st.sampled_from([(1,) * page_size, (1,) * (page_size - 1) + (2,), (3,) + (1,) * (page_size - 1)])
    rest = st.integers(0, page_size - 1).map(lambda n: (1,) * n)
    tokens = st.tuples(st.lists(page, max_size=6), rest).map(lambda parts: (*sum(parts[0], ()), *parts[1]))
    prompt = st.builds(Prompt, tokens.filter(bool), st.sampled_from([None, "a" * 32, "b" * 32]))
    return draw(st.lists(st.tuples(st.sampled_from(["insert", "match"]), prompt), min_size=2, max_size=25))


def published(prompt: Prompt, page_size: int) -> list[int]:
    return block_hashes(prompt.tokens, page_size, Namespace(prompt.extra_key))


def unsigned(of: Ledger) -> set[int]:
    return {hash_ % (1 << 64) for hash_ in of.parents}


@pytest.mark.parametrize("page_size", [1, 4])
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(data=st.data())
def test_it_matches_and_holds_what_sglangs_tree_does(page_size: int, data: st.DataObject) -> None:
    ledger, tree = Ledger(), trees.build("radix", page_size=page_size)
    cache = ledger.cache(page_size)

    for kind, prompt in data.draw(steps(page_size)):
        pages = published(prompt, page_size)
        if kind == "insert":
            tree.insert(prompt)
            cache.insert(pages, len(prompt.tokens))
        else:
            num_tokens, _ = cache.match(pages, len(prompt.tokens))
            assert (num_tokens, cache.peek(pages)) == (tree.match(prompt),) * 2
            reusable = replace(prompt, tokens=prompt.tokens[:-1])  # the last token is always computed
            assert cache.match(pages, len(prompt.tokens) - 1)[0] == tree.match(reusable)
        assert unsigned(ledger) == tree.held()


@settings(deadline=None, max_examples=80, derandomize=True, database=None)
@given(data=st.data())
def test_where_each_node_is_one_page_it_gives_up_what_sglangs_tree_does(data: st.DataObject) -> None:
    ledger, tree = Ledger(), trees.build("radix", page_size=PAGE)
    cache = ledger.cache()
    sizes = data.draw(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=6))
    work = st.tuples(st.sampled_from(["insert", "insert", "match"]), PATHS)

    for num_tokens in sizes:
        for kind, path in data.draw(st.lists(work, max_size=6)):
            tokens = tuple(ord(letter) for letter in path for _ in range(PAGE))
            if kind == "match":
                assert cache.match(hashes(path), WHOLE)[0] == tree.match(Prompt(tokens))
                continue
            for n in range(1, len(path) + 1):
                tree.insert(Prompt(tokens[: n * PAGE]))
                store(cache, path[:n])
        tree.evict(num_tokens)
        cache.evict(num_tokens)
        assert unsigned(ledger) == tree.held()
