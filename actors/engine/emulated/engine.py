"""An emulated engine without its HTTP surface: ranks, adapters, and one request from its fields to its stream."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sglang.srt.mem_cache.events import KvEventLoraNames

from actors.engine.emulated.model import Job
from actors.engine.emulated.rank import EmulatedRank, Stream
from actors.engine.emulated.settings import EmulatedSettings
from actors.engine.emulated.tree import LivePrompt
from actors.engine.identity import content_id, lora_id
from router.ids import LoraId

_LETTERS: Final = 26
_FIRST_LETTER: Final = ord("a")


class RefusedError(Exception):
    """The request can't be served; the message is what SGLang would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    tokens: list[int]
    max_tokens: int
    rid: str
    adapter: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    local_rank: int | None = None
    no_reuse: bool = False
    """Logprobs of the prompt are asked for: all of it is computed."""


@dataclass(slots=True)
class _Adapter:
    lora_id: LoraId
    path: str
    users: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request under way."""

    ask: Ask
    stream: Stream
    adapter: _Adapter | None


class EmulatedEngine:
    """Lives on one loop."""

    def __init__(self, settings: EmulatedSettings, publishers: list[Any]) -> None:
        """`publishers`: one for each rank, SGLang's or alike."""
        self.settings = settings
        self._names = KvEventLoraNames()
        self.ranks = [
            EmulatedRank(
                settings.profile,
                publisher=publisher,
                page_size=settings.page_size,
                dynamo=settings.events.get("format") == "dynamo",
                num_slots=settings.max_loras_per_batch,
                kv_tokens=settings.kv_tokens,
                lora_names=self._names,
            )
            for publisher in publishers
        ]
        self._adapters: dict[str, _Adapter] = {}
        self._running: set[Request] = set()
        self._turn = 0
        for name, path in settings.lora_paths.items():
            self._add(name, path)

    @property
    def adapters(self) -> dict[str, str]:
        """Loaded adapters, name -> folder."""
        return {name: one.path for name, one in self._adapters.items()}

    async def load(self, name: str, path: str) -> None:
        """Raises RefusedError."""
        if name in self._adapters:
            raise RefusedError(f"LoRA with name {name} already exists")
        if len(self._adapters) >= self.settings.max_loaded_loras:
            raise RefusedError(f"max_loaded_loras {self.settings.max_loaded_loras} adapters are loaded")
        await asyncio.sleep(self.settings.profile.load_ms / 1000)
        try:
            self._add(name, path)
        except ValueError as exc:
            raise RefusedError(str(exc)) from exc

    async def unload(self, name: str) -> None:
        """Once its requests are done. Raises RefusedError."""
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            raise RefusedError(f"LoRA with name {name} does not exist")
        if adapter.users:
            await adapter.unused.wait()

    def start(self, ask: Ask) -> Request:
        """Begin a request; `finish` ends it. Raises RefusedError."""
        settings = self.settings
        if not ask.tokens:
            raise RefusedError("the prompt is empty")
        if len(ask.tokens) >= settings.context_length:
            raise RefusedError(
                f"The input ({len(ask.tokens)} tokens) is longer than the model's context length "
                f"({settings.context_length} tokens)."
            )
        adapter = None if ask.adapter is None else self._adapters.get(ask.adapter)
        if ask.adapter is not None and adapter is None:
            raise RefusedError(f"Got LoRA adapter that has never been loaded: {ask.adapter}")
        key = (ask.extra_key or "") + (adapter.lora_id if adapter else "")
        seed = hashlib.sha256(array("I", ask.tokens).tobytes() + key.encode()).digest()
        prompt = LivePrompt(
            tokens=array("q", ask.tokens),
            num_reusable=0 if ask.no_reuse else len(ask.tokens) - 1,
            next_token=lambda i: _FIRST_LETTER + seed[i % len(seed)] % _LETTERS,
            extra_key=key or None,
            cache_salt=ask.cache_salt or None,
        )
        room = settings.context_length - len(ask.tokens)
        job = Job(prompt, len(ask.tokens), max(1, min(ask.max_tokens, room)), adapter and adapter.lora_id)
        rank = self.ranks[self._rank(ask)]
        if adapter is not None:
            adapter.users += 1
            adapter.unused.clear()
        request = Request(ask, rank.submit(job), adapter)
        self._running.add(request)
        return request

    def finish(self, request: Request) -> None:
        """A request is over, or nobody wants it any more."""
        if not request.stream.ended:
            self._abort(request.stream)
        self._running.discard(request)
        if (adapter := request.adapter) is not None:
            adapter.users -= 1
            if not adapter.users:
                adapter.unused.set()

    def abort(self, rid: str) -> None:
        """SGLang ends every request whose id begins so."""
        for request in self._running:
            if request.ask.rid.startswith(rid):
                self._abort(request.stream)

    def flush(self) -> bool:
        """Empty all caches; False where requests run."""
        if not all(rank.is_idle for rank in self.ranks):
            return False
        for rank in self.ranks:
            rank.flush()
        return True

    def _rank(self, ask: Ask) -> int:
        if ask.local_rank is not None:
            if not 0 <= ask.local_rank < len(self.ranks):
                raise RefusedError(f"routed_dp_rank {ask.local_rank} is out of range")
            return ask.local_rank
        self._turn += 1
        return self._turn % len(self.ranks)

    def _abort(self, stream: Stream) -> None:
        for rank in self.ranks:
            rank.abort(stream)

    def _add(self, name: str, path: str) -> None:
        new = lora_id(name, content_id(Path(path)))
        if any(one.lora_id == new for one in self._adapters.values()):
            raise ValueError(f"adapter {name!r} is already loaded with these weights")
        self._names.register(lora_id=new, lora_name=name)
        self._adapters[name] = _Adapter(new, path)
