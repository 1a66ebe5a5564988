"""The truth: one SGLang prefix tree whose events go out by SGLang's own publisher, and a wire that can lose them."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import zmq
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher

from tests.conformance import trees
from tests.conformance.trees import Prompt
from tests.ports import free_port

PAGE: Final = 4
ADAPTERS: Final = {"ad-a": "a" * 32, "ad-b": "b" * 32}
"""lora_id by name, as the engines' name tables know them."""
_BIND_S: Final = 10.0


class TruthEngine:
    """One KV cache. What `publish` sends is what an engine of SGLang sends; `cached` is what it would reuse."""

    def __init__(
        self,
        *,
        kind: str = "radix",
        page_size: int = PAGE,
        bigram: bool = False,
        dynamo: bool = True,
        dp_rank: int = 0,
        buffer_steps: int = 10_000,
        lora_names: dict[str, str] | None = None,
    ) -> None:
        """`lora_names`: adapter name by lora_id; by default those of ADAPTERS."""
        self.dp_rank = dp_rank
        self._names = {v: k for k, v in ADAPTERS.items()} if lora_names is None else lora_names
        self._build = lambda: trees.build(
            kind, page_size=page_size, dynamo=dynamo, bigram=bigram, lora_names=self._names
        )
        self.page_size = page_size
        self.bigram = bigram
        self.dynamo = dynamo
        self._buffer_steps = buffer_steps
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._publisher: ZmqEventPublisher | None = None
        #: batches of the present life
        self.published = 0
        self.start()

    def start(self) -> None:
        """A life: an empty tree, and sequence numbers from 0, on the same addresses as any life before."""
        assert self._publisher is None, "one life at a time"
        self.tree = self._build()
        self.published = 0
        until_s = time.monotonic() + _BIND_S
        while self._publisher is None:
            try:
                self._publisher = ZmqEventPublisher(
                    0,
                    endpoint=self.endpoint,
                    replay_endpoint=self.replay_endpoint,
                    buffer_steps=self._buffer_steps,
                    bind=True,
                )
            except zmq.ZMQError:  # the address of a life that has just ended is free in a moment
                assert time.monotonic() < until_s, f"{self.endpoint} stays taken"

    def stop(self) -> None:
        """The end of a life, without a word to anybody."""
        if self._publisher is not None:
            self._publisher.shutdown()
            atexit.unregister(self._publisher.shutdown)  # which would take a second for each at the end
            self._publisher = None

    def restart(self) -> None:
        """Die and come back on the same addresses."""
        self.stop()
        self.start()

    def store(
        self, tokens: Sequence[int], *, adapter: str | None = None, salt: str | None = None, extra: str | None = None
    ) -> None:
        """Insert a prompt and publish what that did."""
        self.tree.insert(prompt(tokens, adapter=adapter, salt=salt, extra=extra))
        self.publish()

    def evict(self, num_tokens: int) -> None:
        """Make room and publish what that did."""
        self.tree.evict(num_tokens)
        self.publish()

    def clear(self) -> None:
        """Flush the cache and publish it."""
        self.tree.clear()
        self.publish()

    def publish(self, events: list[Any] | None = None, *, dp_rank: int | None = None) -> None:
        """Send a batch: the tree's events, or these."""
        assert self._publisher is not None, "it is dead"
        batch = KVEventBatch(
            ts=time.time(),
            events=self.tree.take_events() if events is None else events,
            attn_dp_rank=self.dp_rank if dp_rank is None else dp_rank,
        )
        self._publisher.publish(batch)
        self._publisher._event_queue.join()  # sent: whoever subscribes from now on is too late for it
        self.published += 1

    def cached(
        self, tokens: Sequence[int], *, adapter: str | None = None, salt: str | None = None, extra: str | None = None
    ) -> int:
        """Full pages' tokens that the tree holds from the start; splits nodes, as a request does."""
        return self.tree.match(prompt(tokens, adapter=adapter, salt=salt, extra=extra))


def prompt(tokens: Sequence[int], *, adapter: str | None, salt: str | None, extra: str | None) -> Prompt:
    """A place in a tree; `adapter` is a name of ADAPTERS, or a lora_id of its own."""
    lora_id = "" if adapter is None else ADAPTERS.get(adapter, adapter)
    return Prompt(tuple(tokens), ((extra or "") + lora_id) or None, salt)


@contextmanager
def silent_socket() -> Iterator[str]:
    """Endpoint of a replay socket that takes questions and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}"
