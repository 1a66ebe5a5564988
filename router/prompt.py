"""Published hashes of a prompt, a chunk of pages at a time, remembered across prompts.

The chain hash of a page costs a SHA-256 or two. A prompt usually begins as an earlier one did, so hashes are
remembered by a fast 128-bit digest of (namespace, all tokens so far), seeded at random per process. Nothing past
the point where the caller stops reading is hashed. Called by RouterCore; knows nothing of who holds what.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from xxhash import xxh3_128_digest

from router.hashing import HASH_BYTES, TOKEN_BYTES, Namespace, PageHashes, hash_pages, pack_bigrams
from router.table import Hashes

CHUNK_TOKENS: Final = 256
"""Tokens a remembered entry spans: small enough to waste little past a fork, large enough to be few."""


class PromptHasher:
    """Hashes prompts for one page size."""

    def __init__(self, *, page_size: int, bigram: bool = False, seed: int = 0, max_pages: int = 1 << 20) -> None:
        """`page_size` in tokens; `bigram` for engines under speculative decoding; `max_pages` bounds the memory
        of remembered hashes, about 20 bytes a page."""
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self._bigram = bigram
        self._page_bytes = page_size * TOKEN_BYTES * (2 if bigram else 1)
        self._chunk_pages = max(1, CHUNK_TOKENS // page_size)
        self._max_chunks = max(1, max_pages // self._chunk_pages // 2)
        self._seed = seed
        #: two generations: what the old one holds and nobody asks for goes when the young one is full
        self._young: dict[bytes, PageHashes] = {}
        self._old: dict[bytes, PageHashes] = {}

    def num_pages(self, packed: bytes) -> int:
        """Full pages of a prompt given as packed tokens."""
        units = len(packed) // TOKEN_BYTES - (1 if self._bigram else 0)
        return max(0, units) // self.page_size

    def pages(self, packed: bytes, namespace: Namespace, *, num_pages: int) -> Iterator[Hashes]:
        """Hashes of the first `num_pages` pages in order: what is remembered at once, the rest chunk by chunk."""
        body = pack_bigrams(packed) if self._bigram else packed
        end = num_pages * self._page_bytes
        step = self._chunk_pages * self._page_bytes
        key = xxh3_128_digest(namespace.key, self._seed)
        known: list[bytes] = []
        digest: bytes | None = None
        start = 0
        while start < end:
            chunk = body[start : min(start + step, end)]
            key = xxh3_128_digest(key + chunk, self._seed)
            entry = self._young.get(key) or self._recall(key)
            if entry is None:
                break
            known.append(entry.packed)
            digest = entry.digest
            start += len(chunk)
        if known:
            yield _as_keys(b"".join(known))
        if start >= end:
            return
        if digest is None:
            digest = namespace.root_digest
        seed = namespace.seed
        while start < end:
            entry = hash_pages(chunk, self._page_bytes, digest=digest, seed=seed)
            self._remember(key, entry)
            yield _as_keys(entry.packed)
            digest = entry.digest
            start += len(chunk)
            chunk = body[start : min(start + step, end)]
            key = xxh3_128_digest(key + chunk, self._seed)

    def _recall(self, key: bytes) -> PageHashes | None:
        entry = self._old.get(key)
        if entry is not None:
            self._remember(key, entry)
        return entry

    def _remember(self, key: bytes, entry: PageHashes) -> None:
        if len(self._young) >= self._max_chunks:
            self._old, self._young = self._young, {}
        self._young[key] = entry


def _as_keys(packed: bytes) -> Hashes:
    assert len(packed) % HASH_BYTES == 0
    return np.frombuffer(packed, ">u8").astype(np.uint64)
