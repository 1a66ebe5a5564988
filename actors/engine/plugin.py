"""What loray plugs into every SGLang process, by SGLang's own extension points. Runs inside the engine.

* `platform`: SGLang on a machine without CUDA; inert where CUDA is.
* `register`: a publisher that tags every event batch with its fleet-wide dp_rank, events that leave before the answer
  they belong to, lora_ids derived from the adapter's files, and a guard, since loading a lora_id that is still loaded
  kills the scheduler.

Reached through the entry points that `child.plugin_path` writes. Sources: sglang.srt.plugins, .platforms,
.disaggregation.kv_events, .managers.tokenizer_control_mixin.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any, Final

import psutil

from actors.engine.identity import content_id, lora_id
from actors.engine.serve import ENGINE_ENV

log = logging.getLogger(__name__)

PUBLISHER: Final = "loray_zmq"
"""Name under which `--kv-events-config` selects the publisher."""
DP_RANK_ENV: Final = "LORAY_FIRST_DP_RANK"
"""Fleet-wide rank of the engine's rank 0."""
_SEND_TIMEOUT_S: Final = 0.02
"""Sending takes well under a millisecond; longer, and the engine goes on without."""
_MAX_TIMEOUTS: Final = 50
"""So many in a row mean that the sending thread is stuck: the engine waits for it no more."""


def platform() -> str | None:
    """Entry point of group `sglang.srt.platforms`: the CPU platform, or None where there is CUDA."""
    import torch

    if torch.cuda.is_available():
        return None
    from actors.engine import cpu

    cpu.tolerate_pinned_memory()
    return "actors.engine.cpu:LorayCpuPlatform"


def register() -> None:
    """Entry point of group `sglang.srt.plugins`: called early in every SGLang process."""
    _end_with_engine()
    register_publisher(int(os.environ.get(DP_RANK_ENV, "0")))
    _publish_before_answering()
    _derive_lora_ids()


def _end_with_engine() -> None:
    """SGLang's processes have the kernel end them with their parent; one whose parent died before they had lives on."""
    engine = int(os.environ.get(ENGINE_ENV, "0"))
    if engine and not psutil.pid_exists(engine):
        log.error("engine %d is gone", engine)
        os._exit(1)


def register_publisher(first_dp_rank: int) -> None:
    """Make PUBLISHER known to SGLang; `first_dp_rank` is the fleet-wide rank of the engine's rank 0."""
    from sglang.srt.disaggregation import kv_events

    class RankedPublisher(kv_events.ZmqEventPublisher):  # type: ignore[misc]  # sglang has no types
        """SGLang's publisher, with ports by the engine's rank and tags by the fleet's; `publish` waits for the wire."""

        def __init__(self, attn_dp_rank: int, **config: Any) -> None:
            super().__init__(attn_dp_rank, **config)
            self._dp_rank = first_dp_rank + attn_dp_rank
            self._timeouts = 0

        def publish(self, events: Any) -> None:
            super().publish(events)
            if self._timeouts >= _MAX_TIMEOUTS:
                return
            queue = self._event_queue
            with queue.all_tasks_done:  # the sending thread may wait for the GIL longer than an answer travels
                sent = queue.all_tasks_done.wait_for(lambda: not queue.unfinished_tasks, _SEND_TIMEOUT_S)
            self._timeouts = 0 if sent else self._timeouts + 1
            if self._timeouts == _MAX_TIMEOUTS:
                log.warning("events are sent too slowly: answers no longer wait for them, predictions may lag")

    kv_events.EventPublisherFactory.register_publisher(PUBLISHER, RankedPublisher)


def _publish_before_answering() -> None:
    """SGLang publishes a request's output blocks when it is idle, or every --decode-log-interval steps: too late for
    the next turn of the same chat, which comes as soon as the answer is there."""
    from sglang.srt.managers.scheduler_components import kv_events_publisher, output_streamer

    publishers: list[Any] = []
    init = kv_events_publisher.SchedulerKvEventsPublisher.__post_init__
    stream_output = output_streamer.SchedulerOutputStreamer.stream_output

    def remembered(self: Any) -> None:
        init(self)
        publishers.append(self)

    def publish_and_stream(self: Any, *args: Any, **kwargs: Any) -> None:
        for publisher in publishers:
            publisher.publish_kv_events()
        stream_output(self, *args, **kwargs)

    kv_events_publisher.SchedulerKvEventsPublisher.__post_init__ = remembered
    output_streamer.SchedulerOutputStreamer.stream_output = publish_and_stream


def _derive_lora_ids() -> None:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers import tokenizer_control_mixin as control
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

    def derived_id(lora_name: str, lora_path: str) -> str:
        return lora_id(lora_name, content_id(Path(lora_path)))

    #: ids of loads that are about to be made, by name and path
    coming: dict[tuple[str, str], str] = {}

    def derived_ref(*, lora_name: str, lora_path: str, pinned: bool | None = None) -> Any:
        new_id = coming.get((lora_name, lora_path)) or derived_id(lora_name, lora_path)
        return LoRARef(lora_id=new_id, lora_name=lora_name, lora_path=lora_path, pinned=pinned)

    load = control.TokenizerControlMixin.load_lora_adapter

    async def guarded_load(self: Any, obj: Any, request: Any = None) -> Any:
        """Refuse what is loaded already, before the scheduler sees it.

        Reading the files takes a second a gigabyte, and this loop sends all answers: a thread does it, once.
        """
        try:
            new_id = await asyncio.to_thread(derived_id, obj.lora_name, obj.lora_path)
        except ValueError as exc:
            return LoadLoRAAdapterReqOutput(success=False, error_message=str(exc))
        for ref in self.lora_registry.get_all_adapters().values():
            if new_id == ref.lora_id:
                return LoadLoRAAdapterReqOutput(
                    success=False, error_message=f"adapter {obj.lora_name!r} is already loaded with these weights"
                )
        coming[obj.lora_name, obj.lora_path] = new_id
        try:
            return await load(self, obj, request)
        finally:
            coming.pop((obj.lora_name, obj.lora_path), None)

    unload = control.TokenizerControlMixin._unload_lora_adapter_locked

    async def final_unload(self: Any, obj: Any) -> Any:
        """Forget the adapter for good: SGLang would load it again by itself for the next request that names it."""
        self.lora_ref_cache.pop(obj.lora_name, None)
        return await unload(self, obj)

    LoRARef.deterministic_id = staticmethod(derived_id)
    control.TokenizerControlMixin._unload_lora_adapter_locked = final_unload
    control.LoRARef = derived_ref
    control.TokenizerControlMixin.load_lora_adapter = guarded_load
