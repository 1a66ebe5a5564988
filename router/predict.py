"""Prediction: how much of a prompt each source holds, from its first token on. One walk over the index a namespace.

Called by RouterCore and by the indexer service; asks no source's state and knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.attestation import HashForm
from router.hashing import Namespace
from router.ids import LoraId
from router.index import BlockIndex
from router.prompt import PromptHasher

Ints = NDArray[np.int64]
UNKNOWN = -1
"""Of cached tokens that can't be known."""


class Place(NamedTuple):
    """A source as a prompt meets it: its column, how its engine hashes, and what it calls the prompt's adapter."""

    column: int
    form: HashForm
    lora_id: LoraId | None


class Group(NamedTuple):
    """Places where a prompt has the same hashes: their columns, and which of all places they are."""

    form: HashForm
    lora_id: LoraId | None
    columns: Ints
    members: Ints


def grouped(places: Sequence[Place]) -> tuple[Group, ...]:
    """All places that have pages at all, by how they hash."""
    members: dict[tuple[HashForm, LoraId | None], list[int]] = {}
    for i, place in enumerate(places):
        if place.form.page_size:
            members.setdefault((place.form, place.lora_id), []).append(i)
    return tuple(
        Group(form, lora_id, np.array([places[i].column for i in which]), np.array(which))
        for (form, lora_id), which in members.items()
    )


class Predictor:
    """Hashes prompts and matches them."""

    def __init__(self, index: BlockIndex, *, hash_seed: int = 0) -> None:
        """`hash_seed`: of the digests under which hashes are remembered, random per process."""
        self._index = index
        self._hash_seed = hash_seed
        self._hashers: dict[tuple[int, bool], PromptHasher] = {}

    def cached_tokens(
        self,
        packed: bytes,
        groups: Sequence[Group],
        known: NDArray[np.bool_],
        *,
        extra_key: str | None,
        cache_salt: str | None,
        limit: int | None = None,
    ) -> Ints:
        """Tokens of full pages that each place holds; UNKNOWN where `known` is false, or hashes don't tell.

        `packed` as of `hashing.pack_tokens`. Of its tokens only the first `limit` count, as where an engine always
        computes the last one; a page of pairs needs one token more than it has pairs.
        """
        cached = np.full(len(known), UNKNOWN)
        for form, lora_id, columns, members in groups:
            is_keyed = lora_id is not None or extra_key is not None
            if is_keyed and not form.dynamo:  # only dynamo hashes tell whose a block is
                continue
            which = known[members]
            if not which.all():
                columns, members = columns[which], members[which]  # those that are left
            if not len(members):
                continue
            namespace = Namespace.of(extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt, dynamo=form.dynamo)
            hasher = self._hasher(form)
            num_pages = hasher.num_pages(packed)
            if limit is not None:
                num_pages = min(num_pages, max(0, limit - form.bigram) // form.page_size)
            depth = self._index.match(hasher.pages(packed, namespace, num_pages=num_pages), columns)
            cached[members] = depth[columns].astype(np.int64) * form.page_size
        return cached

    def _hasher(self, form: HashForm) -> PromptHasher:
        key = (form.page_size, form.bigram)
        if key not in self._hashers:
            self._hashers[key] = PromptHasher(page_size=form.page_size, bigram=form.bigram, seed=self._hash_seed)
        return self._hashers[key]
