"""Requests that cannot enter the batch: each fails alone, and the step goes on with the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headway.core.scheduler_output import NewRequest, SampledTokens, SchedulerOutput

logger = logging.getLogger(__name__)


def why_unseated(request: NewRequest, error: Exception) -> str:
    """What its user is told. What the edge lets through should fit, so it is logged in full."""
    logger.error("request %s cannot enter the batch; it is ended", request.request_id, exc_info=error)
    return f"{type(error).__name__}: {error}"


def failed_shares(output: SchedulerOutput, unseated: Mapping[str, str]) -> dict[str, SampledTokens]:
    """The results of those requests of a step that have no row. Where steps overlap, the next one was planned before
    the scheduler knew."""
    return {
        share.request_id: SampledTokens((), error=unseated[share.request_id])
        for share in output.scheduled
        if share.request_id in unseated
    }
