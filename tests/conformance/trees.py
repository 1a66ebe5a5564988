"""SGLang's own prefix trees behind one small interface: insert, match, evict, clear, and the bytes they publish.

Three of them: the classic RadixCache, and the unified cache that engines run, over its Python and its Rust core.
Nothing of loray is used here, so that what comes out can be held against what the router makes of it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from sglang.srt.disaggregation.kv_events import KVEventBatch, kv_event_namespace_seed, namespaced_block_hash
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.rust_tree_core.extension import bindings
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import hash_str_to_int64

KINDS: Final = ("radix", "unified-python", "unified-rust")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What names a place in the tree. `extra_key` is the engine's: the request's own, then the lora_id."""

    tokens: tuple[int, ...]
    extra_key: str | None = None
    cache_salt: str | None = None


class Tree:
    """One SGLang prefix cache without memory pools. `held` walks all of its nodes."""

    def __init__(self, cache: Any, *, page_size: int, dynamo: bool, bigram: bool) -> None:
        self.page_size = page_size
        self._cache = cache
        self._dynamo = dynamo
        self._bigram = bigram
        self._encoder = msgspec.msgpack.Encoder()  # ZmqEventPublisher's

    def insert(self, prompt: Prompt) -> None:
        self._cache.insert(InsertParams(key=_key(prompt)))

    def match(self, prompt: Prompt) -> int:
        """Cached units of the prompt (tokens, or pairs of them). Splits nodes as a request does."""
        return int(self._cache.match_prefix(MatchPrefixParams(key=_key(prompt))).device_prefix_len)

    def evict(self, num_tokens: int) -> None:
        self._cache.evict(EvictParams(num_tokens=num_tokens))

    def clear(self) -> None:
        self._cache.reset()

    def take_events(self) -> list[Any]:
        """Everything since the last call."""
        return list(self._cache.take_events())

    def publish(self, *, dp_rank: int = 0) -> bytes:
        """Everything since the last call as one batch, as ZmqEventPublisher packs it."""
        batch = KVEventBatch(ts=1.0, events=self.take_events(), attn_dp_rank=dp_rank)
        return self._encoder.encode(batch)

    def held(self) -> set[int]:
        """Published hashes of all pages of all nodes, as unsigned integers."""
        core = getattr(self._cache, "tree_core", self._cache)
        hashes: set[int] = set()
        stack = list(core.root_node.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            hashes |= self._published(node.key, core.kv_events._node_event_hash_values(node))
        return hashes

    def _published(self, key: RadixKey, event_hashes: list[str]) -> set[int]:
        seed = kv_event_namespace_seed(extra_key=key.extra_key, cache_salt=key.cache_salt) if self._dynamo else None
        signed = [namespaced_block_hash(hash_str_to_int64(text), namespace_seed=seed) for text in event_hashes]
        return {value % (1 << 64) for value in signed}


class RustTree(Tree):
    """The Rust core shows no nodes: they are found again by asking for every prompt ever inserted."""

    def __init__(self, cache: Any, *, page_size: int, dynamo: bool, bigram: bool) -> None:
        super().__init__(cache, page_size=page_size, dynamo=dynamo, bigram=bigram)
        self._inserted: set[Prompt] = set()

    def insert(self, prompt: Prompt) -> None:
        self._inserted.add(prompt)
        super().insert(prompt)

    def held(self) -> set[int]:
        hashes: set[int] = set()
        for prompt in self._inserted:
            key, _ = _key(prompt).maybe_to_bigram_view(self._bigram)
            length, _, _ = self._cache.tree_core.match_full_device_prefix(key)
            salt = key.cache_salt
            root = None if salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).hexdigest()
            pages = bindings.get_hash_str(key.token_ids, root, self.page_size, is_bigram=self._bigram)
            hashes |= self._published(key, pages[: length // self.page_size])
        total_tokens, _ = self._cache.total_size()
        assert not self._dynamo or total_tokens == len(hashes) * self.page_size, "a node that no prompt leads to"
        return hashes


def build(
    kind: str, *, page_size: int, dynamo: bool = True, bigram: bool = False, lora_names: dict[str, str] | None = None
) -> Tree:
    """A tree of one of KINDS. `lora_names`: adapter name by lora_id, as the engine's table knows them."""
    names = KvEventLoraNames()
    for lora_id, name in (lora_names or {}).items():
        names.register(lora_id=lora_id, lora_name=name)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=_NoMemory(),
        page_size=page_size,
        is_eagle=bigram,
        enable_kv_cache_events=True,
        dynamo_kv_event_format=dynamo,
        kv_event_lora_names=names,
    )
    if kind == "radix":
        return Tree(RadixCache(params), page_size=page_size, dynamo=dynamo, bigram=bigram)
    params.tree_components = (ComponentType.FULL,)
    params.tree_core_backend = kind.removeprefix("unified-")
    shell = RustTree if kind == "unified-rust" else Tree
    return shell(UnifiedRadixCache(params), page_size=page_size, dynamo=dynamo, bigram=bigram)


class _NoMemory:
    """Stands where the engine's allocator is told which rows are free again."""

    device = "cpu"

    def free(self, rows: Any) -> None: ...

    def free_segment(self, rows: Any, *, start_pos: int) -> None: ...


def _key(prompt: Prompt) -> RadixKey:
    return RadixKey(array("q", prompt.tokens), extra_key=prompt.extra_key, cache_salt=prompt.cache_salt)
