"""Block hashes as SGLang 0.5.23 publishes them; the only module that knows the bytes.

Theory of operation. For page i of a prompt SGLang chains `digest_i = sha256(digest_{i-1} || page_i)`, the
page being its token ids as 4-byte little-endian words (pairs of ids under speculative decoding). The engine
hash E_i is the first 8 bytes of digest_i, read as a signed big-endian integer. A cache salt starts the chain
from another digest. The dynamo event format mixes E_i with a seed of the namespace (extra_key, cache_salt).
Sources: sglang.srt.mem_cache.utils, sglang.srt.disaggregation.kv_events; vectors in tests/conformance/golden.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from router.ids import LoraId

_NAMESPACE_TAG = b"sglang-kv-event-namespace-v1"
_SALT_TAG = b"sglang-cache-salt-v1\0"
HASH_BYTES = 8
"""Width of a published hash."""
TOKEN_BYTES = 4
"""Width of one token id in the hashed bytes."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the engine mixes into the block hashes of a request, besides its tokens.

    `extra_key` is the request's own extra_key followed by the adapter's lora_id, or None for neither;
    `cache_salt` is the request's, or None. `dynamo` says whether the engine publishes in dynamo format.
    """

    extra_key: str | None = None
    cache_salt: str | None = None
    dynamo: bool = True

    @classmethod
    def of(
        cls, *, extra_key: str | None, lora_id: LoraId | None, cache_salt: str | None, dynamo: bool = True
    ) -> Namespace:
        """Namespace of a request, joined as SGLang's Req joins it: extra_key, then lora_id; what is empty is none."""
        joined = (extra_key or "") + (lora_id or "")
        return cls(extra_key=joined or None, cache_salt=cache_salt or None, dynamo=dynamo)

    @property
    def key(self) -> bytes:
        """All of it in bytes, other ones for another namespace."""
        return f"{self.extra_key!r} {self.cache_salt!r} {self.dynamo}".encode()

    @property
    def root_digest(self) -> bytes:
        """Digest that the chain starts from; empty without a salt."""
        return b"" if self.cache_salt is None else hashlib.sha256(_SALT_TAG + self.cache_salt.encode()).digest()

    @property
    def seed(self) -> bytes | None:
        """32 bytes that each E_i is mixed with, or None where the published hash is E_i itself."""
        if not self.dynamo or (self.extra_key is None and self.cache_salt is None):
            return None
        digest = hashlib.sha256(_NAMESPACE_TAG)
        for part in (self.extra_key, self.cache_salt):
            if part is None:
                digest.update(b"\0")
                continue
            encoded = part.encode()
            digest.update(b"\1" + len(encoded).to_bytes(8, "little") + encoded)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class PageHashes:
    """Published hashes of consecutive pages, and the digest from which the chain goes on."""

    packed: bytes
    """8 bytes a page, big-endian, signed."""
    digest: bytes


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as 4-byte little-endian words, the form in which they are hashed.

    Raises:
        OverflowError: an id is negative or does not fit 32 bits.
        TypeError: an id is not an integer.
    """
    words = array("I", token_ids)
    assert words.itemsize == TOKEN_BYTES
    return words.tobytes()


def pack_bigrams(packed: bytes) -> bytes:
    """Pairs (t_j, t_j+1) as 8 bytes each, the units that pages hold under speculative decoding."""
    words = array("I", packed)
    pairs = array("I", bytes(TOKEN_BYTES * 2 * max(0, len(words) - 1)))
    pairs[0::2] = words[:-1]
    pairs[1::2] = words[1:]
    return pairs.tobytes()


def hash_pages(packed: bytes, page_bytes: int, *, digest: bytes, seed: bytes | None) -> PageHashes:
    """Hashes of the full pages of `packed`; a rest shorter than a page is ignored. O(len(packed))."""
    sha256 = hashlib.sha256
    published: list[bytes] = []
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        digest = sha256(digest + packed[start : start + page_bytes]).digest()
        published.append(
            digest[:HASH_BYTES] if seed is None else sha256(seed + digest[:HASH_BYTES]).digest()[:HASH_BYTES]
        )
    return PageHashes(b"".join(published), digest)


def block_hashes(token_ids: Sequence[int], page_size: int, namespace: Namespace, *, bigram: bool = False) -> list[int]:
    """Published hashes of all full pages, as the signed integers that the engine sends."""
    packed = pack_tokens(token_ids)
    unit_bytes = TOKEN_BYTES
    if bigram:
        packed, unit_bytes = pack_bigrams(packed), 2 * TOKEN_BYTES
    hashes = hash_pages(packed, page_size * unit_bytes, digest=namespace.root_digest, seed=namespace.seed).packed
    return [int.from_bytes(hashes[i : i + HASH_BYTES], "big", signed=True) for i in range(0, len(hashes), HASH_BYTES)]
