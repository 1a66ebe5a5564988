"""What a decision is made of, and how it is told afterwards: values only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.choice import LoggedCandidate, LoggedDecision
from router.cost import Costs
from router.decision import Decision, RouteRequest
from router.ids import LoraId
from router.ingest import SourceState
from router.roster import Target


@dataclass(slots=True)
class Evaluation:
    """Candidates of one request; all sequences run parallel."""

    targets: list[Target]
    states: list[SourceState]
    lora_ids: list[LoraId | None]
    predicted: list[int | None]
    columns: NDArray[np.int64]
    costs: Costs


@dataclass(frozen=True, slots=True)
class Made:
    """A decision with what it was made of."""

    number: int
    request: RouteRequest
    decision: Decision
    found: Evaluation
    chosen: int
    running: NDArray[np.float64]
    left_out: NDArray[np.bool_]

    def logged(self) -> LoggedDecision:
        found = self.found
        return LoggedDecision(
            number=self.number,
            at_s=self.request.now_s,
            adapter=self.request.adapter,
            prompt_tokens=self.decision.prompt_tokens,
            reason=self.decision.reason,
            chosen=self.chosen,
            candidates=[
                LoggedCandidate(
                    worker=target.source.worker_id,
                    dp_rank=target.source.dp_rank,
                    state=found.states[i],
                    predicted_cached_tokens=found.predicted[i],
                    running=float(self.running[i]),
                    left_out=bool(self.left_out[i]),
                    terms_ms=found.costs.row(i),
                )
                for i, target in enumerate(found.targets)
            ],
        )
