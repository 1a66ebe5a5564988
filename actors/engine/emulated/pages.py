"""A prefix cache of hashes instead of tokens, for traces: pages in a tree, leaves given up the longest unused first.

SGLang gives up whole nodes, this one single pages; otherwise it holds what SGLang's radix cache holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count


class _Page:
    __slots__ = ("children", "hash", "locks", "offered", "parent", "used")

    def __init__(self, hash_: int, parent: _Page | None) -> None:
        self.hash = hash_
        self.parent = parent
        self.children = 0
        self.locks = 0
        self.used = 0
        self.offered = False


class PageCache:
    """A model.Cache whose prompts are the hashes of their full pages, in order; a hash covers all before it."""

    def __init__(
        self, page_size: int, *, stored: Callable[[list[int], int | None], None], removed: Callable[[list[int]], None]
    ) -> None:
        """Both are told hashes as they come and go; `stored` also that of the page before, None at the start."""
        self._page_size = page_size
        self._stored = stored
        self._removed = removed
        self._root = _Page(0, None)
        self._root.locks = 1
        self._pages: dict[int, _Page] = {}
        self._num_locked = 0
        self._tick = count(1)
        self._order = count()
        #: leaves that nobody has locked, and outdated entries; a page at most once
        self._leaves: list[tuple[int, int, _Page]] = []

    @property
    def held(self) -> int:
        """See Cache."""
        return len(self._pages) * self._page_size

    @property
    def evictable(self) -> int:
        """See Cache."""
        return (len(self._pages) - self._num_locked) * self._page_size

    def match(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, _Page]:
        """See Cache."""
        pages, place, tick, depth = self._pages, self._root, next(self._tick), 0
        for hash_ in prompt[: num_tokens // self._page_size]:
            page = pages.get(hash_)
            if page is None:
                break
            page.used = tick
            place = page
            depth += 1
        return depth * self._page_size, place

    def peek(self, prompt: Sequence[int]) -> int:
        """Tokens held from the start; leaves no trace, unlike a match."""
        depth = 0
        for hash_ in prompt:
            if hash_ not in self._pages:
                break
            depth += 1
        return depth * self._page_size

    def insert(self, prompt: Sequence[int], num_tokens: int) -> tuple[int, _Page]:
        """See Cache."""
        pages, place, tick = self._pages, self._root, next(self._tick)
        new: list[int] = []
        parent: int | None = None
        full = prompt[: num_tokens // self._page_size]
        for hash_ in full:
            page = pages.get(hash_)
            if page is None:
                page = pages[hash_] = _Page(hash_, place)
                place.children += 1
                if not new and place is not self._root:
                    parent = place.hash
                new.append(hash_)
            page.used = tick
            place = page
        if new:
            self._stored(new, parent)
            self._offer(place)
        return len(full) * self._page_size, place

    def lock(self, place: _Page) -> _Page:
        """See Cache."""
        page: _Page | None = place
        while page is not None:
            if page.locks == 0:
                self._num_locked += 1
            page.locks += 1
            page = page.parent
        return place

    def unlock(self, lock: _Page) -> None:
        """See Cache."""
        page: _Page | None = lock
        while page is not None:
            page.locks -= 1
            if page.locks == 0:
                self._num_locked -= 1
            page = page.parent
        self._offer(lock)

    def evict(self, num_tokens: int) -> None:
        """See Cache."""
        wanted = -(-num_tokens // self._page_size)
        gone: list[int] = []
        while len(gone) < wanted and self._leaves:
            used, _, page = heapq.heappop(self._leaves)
            page.offered = False
            if page.locks or page.children:
                continue
            if used != page.used:
                self._offer(page)
                continue
            del self._pages[page.hash]
            gone.append(page.hash)
            parent = page.parent
            assert parent is not None
            parent.children -= 1
            self._offer(parent)
        if gone:
            self._removed(gone)

    def _offer(self, page: _Page) -> None:
        if not page.locks and not page.children and not page.offered:
            page.offered = True
            heapq.heappush(self._leaves, (page.used, next(self._order), page))
