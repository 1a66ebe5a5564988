"""What a decision is made of, and how it is told afterwards: values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from router.choice import LoggedCandidate, LoggedDecision
from router.cost import Costs
from router.decision import Decision, RouteRequest
from router.holders import Holders
from router.ingest import SourceState
from router.predict import UNKNOWN


@dataclass(slots=True)
class Evaluation:
    """Candidates of one request; all sequences run parallel."""

    holders: Holders
    states: Sequence[SourceState]
    cached: NDArray[np.int64]
    """Tokens to expect; UNKNOWN where it can't be known."""
    costs: Costs

    def predicted(self, i: int) -> int | None:
        """Cached tokens to expect at a candidate; None where it can't be known."""
        tokens = int(self.cached[i])
        return None if tokens == UNKNOWN else tokens


@dataclass(slots=True)
class Made:
    """A decision with what it was made of."""

    number: int
    request: RouteRequest
    decision: Decision
    found: Evaluation
    chosen: int
    left_out: NDArray[np.bool_]

    def logged(self) -> LoggedDecision:
        """As it goes into a log."""
        return LoggedDecision(
            number=self.number,
            at_s=self.request.now_s,
            adapter=self.request.adapter,
            prompt_tokens=self.decision.prompt_tokens,
            reason=self.decision.reason,
            chosen=self.chosen,
            candidates=candidates(self.found, self.left_out),
        )


def candidates(found: Evaluation, left_out: NDArray[np.bool_]) -> list[LoggedCandidate]:
    """All candidates in order."""
    return [
        LoggedCandidate(
            worker=target.source.worker_id,
            dp_rank=target.source.dp_rank,
            state=found.states[i],
            predicted_cached_tokens=found.predicted(i),
            running=float(found.costs.running[i]),
            left_out=bool(left_out[i]),
            terms_ms=found.costs.row(i),
        )
        for i, target in enumerate(found.holders.targets)
    ]
