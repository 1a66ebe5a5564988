"""Prompts whose pages are letters, and what a page cache has told of its pages, replayed."""

from __future__ import annotations

from functools import cache

from actors.engine.emulated.pages import PageCache
from router.hashing import Namespace, block_hashes

PAGE = 4


@cache
def hashes(pages: str, adapter: str | None = None) -> tuple[int, ...]:
    """As published for a prompt with a page of equal tokens for each letter."""
    tokens = [ord(letter) for letter in pages for _ in range(PAGE)]
    return tuple(block_hashes(tokens, PAGE, Namespace(adapter)))


class Ledger:
    """Hears a cache. Each page comes after its parent, once, and goes before it."""

    def __init__(self) -> None:
        #: the page before each page that is held, None at the start
        self.parents: dict[int, int | None] = {}
        #: what was told last
        self.stored: list[int] = []
        self.removed: list[int] = []

    def cache(self, page_size: int = PAGE) -> PageCache:
        """A cache that this ledger hears."""
        return PageCache(page_size, stored=self._store, removed=self._remove)

    def _store(self, hashes: list[int], parent: int | None) -> None:
        assert hashes, "told of nothing"
        self.stored = list(hashes)
        for hash_ in hashes:
            assert hash_ not in self.parents, "stored twice"
            assert parent is None or parent in self.parents, "stored after a page that isn't held"
            self.parents[hash_] = parent
            parent = hash_

    def _remove(self, hashes: list[int]) -> None:
        assert hashes, "told of nothing"
        self.removed = list(hashes)
        for hash_ in hashes:
            assert hash_ in self.parents, "removed, but not held"
            del self.parents[hash_]
            assert hash_ not in self.parents.values(), "an inner page went before its leaves"
