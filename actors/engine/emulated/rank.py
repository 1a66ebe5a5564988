"""One rank of an emulated engine in real time: the model, its cache, its publisher, and who waits on it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.events import KvEventLoraNames

from actors.engine.emulated.model import EngineModel, Job
from actors.engine.emulated.profiles import Profile
from actors.engine.emulated.tree import LivePrompt, TreeCache

_MAX_STEPS = 8
"""Tokens that a stream gets at once at most: hundreds of engines share a machine's cores."""


class Stream:
    """One request's output: how many tokens there are, and whether it is over."""

    def __init__(self, job: Job[LivePrompt]) -> None:
        self.job = job
        self.num_tokens = 0
        self.ended = False
        self._more = asyncio.Event()

    def give(self, num_tokens: int) -> None:
        """More output."""
        self.num_tokens += num_tokens
        self._more.set()

    def end(self) -> None:
        """No more output."""
        self.ended = True
        self._more.set()

    async def more(self) -> None:
        """Wait until there is more, or it is over."""
        await self._more.wait()
        self._more.clear()


class EmulatedRank:
    """Lives on one loop."""

    def __init__(
        self,
        profile: Profile,
        *,
        publisher: Any,
        page_size: int,
        dynamo: bool,
        num_slots: int,
        kv_tokens: int,
        lora_names: KvEventLoraNames,
    ) -> None:
        self._cache = TreeCache(page_size=page_size, dynamo=dynamo, lora_names=lora_names)
        self.model = EngineModel(
            profile,
            self._cache,
            num_slots=num_slots,
            kv_tokens=kv_tokens,
            page_size=page_size,
            max_steps=_MAX_STEPS,
        )
        self._publisher = publisher
        self._streams: dict[int, Stream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._publish()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits, aborted requests included."""
        return not self._streams and self.model.next_s is None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._streams)

    @property
    def used_tokens(self) -> int:
        """KV cache in use, what is only cached apart."""
        return self._cache.held - self._cache.evictable + self.model.private_tokens

    def submit(self, job: Job[LivePrompt]) -> Stream:
        """Start a request."""
        stream = self._streams[id(job)] = Stream(job)
        self.model.submit(job, time.monotonic())
        self._wake()
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request early."""
        self.model.abort(stream.job, time.monotonic())
        self._streams.pop(id(stream.job), None)
        stream.end()
        self._wake()

    def flush(self) -> None:
        """Empty the cache; only while idle."""
        assert self.is_idle
        self._cache.flush()
        self._publish()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_s := self.model.next_s) is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s - time.monotonic()), self._advance)

    def _advance(self) -> None:
        self._timer = None
        output = self.model.advance()
        self._publish()  # events leave before the output they belong to
        for job, num_tokens in output.tokens:
            if (stream := self._streams.get(id(job))) is not None:
                stream.give(num_tokens)
        for job in output.ended:
            if (stream := self._streams.pop(id(job), None)) is not None:
                stream.end()
        self._wake()

    def _publish(self) -> None:
        if events := self._cache.take_events():
            self._publisher.publish(KVEventBatch(ts=time.time(), events=events))
