"""What a router shows of itself: JSON values made from the core's state. Read only."""

from __future__ import annotations

from typing import Any

from router.choice import LoggedCandidate
from router.core import RouterCore
from router.decision import RouteRequest
from router.decode import DecodeBook
from router.ids import SourceId
from router.reports import AdapterState


def model_card(core: RouterCore, name: str, *, served_name: str, created_s: int) -> dict[str, Any]:
    """OpenAI's model object for the base model or an adapter, with the workers that hold it."""
    is_base = name == served_name
    limits = [record.report.context_length for record in core.workers.values()]
    holders = sorted(
        record.report.worker_id for record in core.workers.values() if is_base or core.loaded(record, name) is not None
    )
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "loray",
        "root": name,
        "parent": None if is_base else served_name,
        "max_model_len": max(limits, default=0) or None,
        "state": "loaded" if holders else _adapter_state(core, name),
        "holders": holders,
    }


def _adapter_state(core: RouterCore, name: str) -> str:
    """Of one that no worker holds: what the furthest is at, or `cold`, which the next request changes."""
    states = {row.state for row in core.table.holdings if row.name == name}
    order = (AdapterState.LOADING, AdapterState.FAILED, AdapterState.UNLOADING)
    return next((state.value for state in order if state in states), "cold")


def status(core: RouterCore) -> dict[str, Any]:
    """Workers with their ranks, and the copy of the LoRA table."""
    workers = {
        worker_id: {
            "state": record.report.state,
            "incarnation": record.report.incarnation,
            "url": record.report.url,
            "page_size": record.report.page_size,
            "suspended": record.suspended,
            "ranks": [_rank(core, source) for source in record.sources],
        }
        for worker_id, record in core.workers.items()
    }
    return {
        "workers": workers,
        "table_version": core.table.version,
        "adapters": list(core.table.names),
        "measured": {
            "slot_wait_ms": round(core.load.slot_ms, 1),
            "request_ms": round(core.load.request_ms, 1),
            "output_tokens": round(core.load.output_tokens, 1),
            "adapter_load_ms": round(core.load.adapter_load_ms, 1),
            "decode_step": _decode(core.load.decode),
        },
        "index_bytes": core.ingest.index.size_bytes,
    }


def explanation(core: RouterCore, wanted: RouteRequest) -> dict[str, Any]:
    """Where the request would go now, and what every candidate would cost. Raises NoCapacity."""
    decision = core.preview(wanted)
    return {
        "prompt_tokens": decision.prompt_tokens,
        "worker": decision.source.worker_id,
        "dp_rank": decision.source.dp_rank,
        "reason": decision.reason,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "candidates": [_candidate(candidate) for candidate in core.explain(wanted)],
    }


def _decode(decode: DecodeBook) -> dict[str, float]:
    base_ms, request_ms, context_token_ms = decode.model.tolist()
    return {
        "ms": round(base_ms, 2),
        "ms_per_request": round(request_ms, 3),
        "ms_per_1000_context_tokens": round(context_token_ms * 1000, 3),
        "samples": decode.num_samples,
    }


def _candidate(candidate: LoggedCandidate) -> dict[str, Any]:
    return {
        "worker": candidate.worker,
        "dp_rank": candidate.dp_rank,
        "state": candidate.state,
        "predicted_cached_tokens": candidate.predicted_cached_tokens,
        "left_out": candidate.left_out,
        "cost_ms": round(candidate.cost_ms, 3),
        "terms_ms": {name: round(ms, 3) for name, ms in candidate.terms_ms.items()},
    }


def _rank(core: RouterCore, source: SourceId) -> dict[str, Any]:
    ingest, load = core.ingest, core.load
    column = ingest.column(source)
    return {
        "dp_rank": source.dp_rank,
        "state": ingest.state(source),
        "fault": ingest.fault(source),
        "cached_blocks": ingest.index.num_blocks(source),
        "in_flight": int(load.running[column]),
        "queued_prefill_tokens": int(load.queued_tokens[column]),
        "prefill_tokens_per_s": round(load.speed.tokens_per_s(column), 1),
        "samples": load.speed.num_samples(column),
        "booked_kv_tokens": int(load.kv_tokens[column]),
        "in_flight_elsewhere": int(load.foreign[column]),
        "running_adapters": int(load.distinct[column]),
        "next_seq": ingest.cursor(source).next_seq,
        "gaps": ingest.cursor(source).gaps,
    }
