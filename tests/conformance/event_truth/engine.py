"""The truth: one SGLang prefix tree whose events go out by SGLang's own publisher, and a wire that can lose them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

import zmq
from sglang.srt.disaggregation.kv_events import KVEventBatch, ZmqEventPublisher

from tests.conformance import trees
from tests.conformance.trees import Prompt

PAGE: Final = 4
ADAPTERS: Final = {"ad-a": "a" * 32, "ad-b": "b" * 32}
"""lora_id by name, as the engines' name tables know them."""
_BIND_S: Final = 10.0


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


Fate = Callable[[int], int]
"""How often a batch of a seq goes out: 0 loses it, 2 doubles it."""


class LossyWire:
    """A proxy of an engine's event stream. `fate` decides for each batch; whoever listens is subscribed for sure."""

    def __init__(self, engine: TruthEngine) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.fate: Fate = lambda _seq: 1
        #: seqs that have come from the engine in its present life, and subscriptions that have come from listeners
        self.heard: set[int] = set()
        self._engine = engine
        self._listeners = threading.Event()
        self._ended = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(_BIND_S)

    def connect(self) -> None:
        """Until the engine's batches come here and somebody listens. Publishes empty batches to find out."""
        until_s = time.monotonic() + _BIND_S
        while not self.heard:
            assert time.monotonic() < until_s, "nothing comes from the engine"
            self._engine.publish([])
            self._ended.wait(0.05)
        assert self._listeners.wait(_BIND_S), "nobody listens"

    def wait_heard(self, seq: int) -> None:
        """Until a batch has passed here, or was lost here."""
        until_s = time.monotonic() + _BIND_S
        while seq not in self.heard:
            assert time.monotonic() < until_s, f"batch {seq} doesn't come"
            self._ended.wait(0.005)

    def close(self) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join(_BIND_S)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as source, context.socket(zmq.XPUB) as sink:
            for one in (source, sink):
                one.linger = 0
            source.subscribe(b"")
            source.connect(self._engine.endpoint)
            sink.bind(self.endpoint)
            self._bound.set()
            while not self._ended.is_set():
                if sink.poll(0):
                    sink.recv()
                    self._listeners.set()
                if not source.poll(5):
                    continue
                frames = source.recv_multipart()
                seq = int.from_bytes(frames[1], "big")
                for _ in range(self.fate(seq)):
                    sink.send_multipart(frames)
                self.heard.add(seq)


@contextmanager
def silent_socket() -> Iterator[str]:
    """Endpoint of a replay socket that takes questions and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        yield f"tcp://127.0.0.1:{port}"
