"""Prompts of a trace as tokens, and the hashes that an engine publishes for them under the adapter of the moment."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from deployment.simulate.trace import Call
from router.hashing import Namespace
from router.ids import LoraId
from router.prompt import PromptHasher

_TAIL = (0xFFFFFFFF).to_bytes(4, "little")
"""A token of a prompt's last, not full page."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What engines and routers see of a call."""

    packed: bytes
    hashes: list[int]
    lora_id: LoraId | None


class PromptBook:
    """Makes prompts, and knows what a hash stands for."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._hasher = PromptHasher(page_size=page_size)
        self._pages: dict[int, bytes] = {}
        self._reloads: Counter[str] = Counter()
        #: adapter's name and page by published hash; what an event's own tokens and name tell
        self.meaning: dict[int, tuple[str | None, int]] = {}

    def lora_id(self, adapter: str) -> LoraId:
        """Of the weights that the adapter has now."""
        return LoraId(hashlib.md5(f"{adapter}/{self._reloads[adapter]}".encode()).hexdigest())

    def reload(self, adapter: str) -> LoraId:
        """Other weights under the same name."""
        self._reloads[adapter] += 1
        return self.lora_id(adapter)

    def prompt(self, call: Call) -> Prompt:
        """The call as of now."""
        lora_id = None if call.adapter is None else self.lora_id(call.adapter)
        packed = b"".join(map(self._page, call.pages))
        tail = call.num_tokens - len(call.pages) * self._page_size
        namespace = Namespace.of(extra_key=None, lora_id=lora_id, cache_salt=None)
        hashes: list[int] = []
        for some in self._hasher.pages(packed, namespace, num_pages=len(call.pages)):
            hashes += some.tolist()
        if hashes and hashes[-1] not in self.meaning:
            for hash_, page in zip(hashes, call.pages, strict=True):
                self.meaning[hash_] = (call.adapter, page)
        return Prompt(packed + _TAIL * tail, hashes, lora_id)

    def _page(self, page: int) -> bytes:
        known = self._pages.get(page)
        if known is None:
            known = self._pages[page] = page.to_bytes(4, "little") * self._page_size
        return known
