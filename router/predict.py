"""Prediction: how much of a prompt each source holds, from its first token on. One walk over the index a namespace.

Called by RouterCore and by the indexer service; asks no source's state and knows nothing of load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.attestation import HashForm
from router.hashing import Namespace
from router.ids import LoraId
from router.index import BlockIndex
from router.prompt import PromptHasher


class Place(NamedTuple):
    """A source as a prompt meets it: its column, how its engine hashes, and what it calls the prompt's adapter."""

    column: int
    form: HashForm
    lora_id: LoraId | None


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
        places: Sequence[Place],
        *,
        extra_key: str | None,
        cache_salt: str | None,
        limit: int | None = None,
    ) -> list[int | None]:
        """Tokens of full pages that each place holds, parallel to `places`; None where hashes don't tell.

        `packed` as of `hashing.pack_tokens`. Of its tokens only the first `limit` count, as where an engine always
        computes the last one; a page of pairs needs one token more than it has pairs.
        """
        cached: list[int | None] = [None] * len(places)
        groups: dict[tuple[HashForm, LoraId | None], list[int]] = {}
        for i, place in enumerate(places):
            keyed = place.lora_id is not None or extra_key is not None  # which only dynamo hashes tell apart
            if place.form.page_size and (place.form.dynamo or not keyed):
                groups.setdefault((place.form, place.lora_id), []).append(i)
        for (form, lora_id), members in groups.items():
            namespace = Namespace.of(extra_key=extra_key, lora_id=lora_id, cache_salt=cache_salt, dynamo=form.dynamo)
            hasher = self._hasher(form)
            num_pages = hasher.num_pages(packed)
            if limit is not None:
                num_pages = min(num_pages, max(0, limit - form.bigram) // form.page_size)
            columns = [places[i].column for i in members]
            depth = self._index.match(hasher.pages(packed, namespace, num_pages=num_pages), columns)
            for i, column in zip(members, columns, strict=True):
                cached[i] = int(depth[column]) * form.page_size
        return cached

    def _hasher(self, form: HashForm) -> PromptHasher:
        key = (form.page_size, form.bigram)
        if key not in self._hashers:
            self._hashers[key] = PromptHasher(page_size=form.page_size, bigram=form.bigram, seed=self._hash_seed)
        return self._hashers[key]
