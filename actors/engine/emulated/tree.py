"""The model's cache as SGLang has it: its unified radix tree, real tokens, and the events that it records."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

_TREE_CORE: Final = "rust"
"""What SGLang's engines use unless told otherwise."""


@dataclass(slots=True, eq=False)
class LivePrompt:
    """A prompt and what comes after it. `extra_key` is the engine's: the request's own, then the lora_id."""

    tokens: array[int]
    num_reusable: int
    """Tokens from the start that may come from the cache: the last one never does."""
    next_token: Callable[[int], int]
    """Output token by its position."""
    extra_key: str | None = None
    cache_salt: str | None = None
    output: list[int] = field(default_factory=list)

    def upto(self, num_tokens: int) -> array[int]:
        """The first `num_tokens`, output made as it is needed."""
        num_output = num_tokens - len(self.tokens)
        while len(self.output) < num_output:
            self.output.append(self.next_token(len(self.output)))
        return self.tokens[:num_tokens] + array("q", self.output[: max(0, num_output)])


class TreeCache:
    """A model.Cache. `take_events` gives what it has recorded since the last call."""

    def __init__(self, *, page_size: int, dynamo: bool, lora_names: KvEventLoraNames) -> None:
        """`lora_names`: the engine's name table, which events are named by."""
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=_NoMemory(),
            page_size=page_size,
            enable_kv_cache_events=True,
            dynamo_kv_event_format=dynamo,
            kv_event_lora_names=lora_names,
        )
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = _TREE_CORE
        self._page_size = page_size
        self._tree = UnifiedRadixCache(params)

    @property
    def held(self) -> int:
        """See Cache."""
        return int(self._tree.evictable_size() + self._tree.protected_size())

    @property
    def evictable(self) -> int:
        """See Cache."""
        return int(self._tree.evictable_size())

    def match(self, prompt: LivePrompt, num_tokens: int) -> tuple[int, Any]:
        """See Cache; splits nodes, as a request does."""
        tokens = prompt.tokens[: min(num_tokens, prompt.num_reusable)]
        found = self._tree.match_prefix(MatchPrefixParams(key=_key(prompt, tokens)))
        return int(found.device_prefix_len), found.last_device_node

    def insert(self, prompt: LivePrompt, num_tokens: int) -> tuple[int, Any]:
        """See Cache."""
        place = self._tree.insert(InsertParams(key=_key(prompt, prompt.upto(num_tokens)))).last_device_node
        return num_tokens // self._page_size * self._page_size, place

    def lock(self, place: Any) -> Any:
        """See Cache."""
        return self._tree.lock(place)

    def unlock(self, lock: Any) -> None:
        """See Cache."""
        self._tree.unlock(lock)

    def evict(self, num_tokens: int) -> None:
        """See Cache."""
        self._tree.evict(EvictParams(num_tokens=num_tokens))

    def flush(self) -> None:
        """Empty it. Nothing may be locked."""
        self._tree.reset()

    def take_events(self) -> list[Any]:
        """Events since the last call, in order."""
        return list(self._tree.take_events())


class _NoMemory:
    """Stands where the engine's allocator is told which rows are free again."""

    device = "cpu"

    def free(self, rows: Any) -> None:
        """There are none."""

    def free_segment(self, rows: Any, *, start_pos: int) -> None:
        """There are none."""


def _key(prompt: LivePrompt, tokens: array[int]) -> RadixKey:
    return RadixKey(tokens, extra_key=prompt.extra_key, cache_salt=prompt.cache_salt)
