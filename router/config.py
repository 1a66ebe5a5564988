"""Section `router` of the configuration."""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.admission import AdmissionConfig
from router.cost import CostWeights


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may say of the router."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback unless told otherwise."""
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)] = 8000
    api_key: str | None = None
    """Clients must send it as a bearer token; None lets everybody in."""
    weights: CostWeights = CostWeights()
    admission: AdmissionConfig = AdmissionConfig()
    max_body_mb: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Larger request bodies are refused with 413."""
    max_index_mb: Annotated[int, msgspec.Meta(ge=16, le=1 << 20)] = 4096
    """Memory of the block index, 16 to 34 bytes a distinct block up to 64 caches. At the limit the source with the most
    blocks is set aside: routed by load, shown as unverified, taken back when it fits."""
    adapter_wait_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """Longest that a request waits for its adapter to be loaded."""
    audit_interval_s: Annotated[float, msgspec.Meta(ge=0)] = 15.0
    """Pace of the background audit, one cache at a time: compares the index with a worker's mirror and asks its engine
    one prompt. 0 turns it off."""
    decision_log: str | None = None
    """File that every decision is written to, with all it depended on; begun anew with each router."""
    request_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Longest life of a request."""
