"""Turns an engine's outputs into the deltas that are sent to its front end."""

from __future__ import annotations

from collections.abc import Mapping

from headway.outputs import LogprobsOfOnePosition, RequestMetrics, RequestOutput
from headway.structured.compile_grammar import REFUSAL
from headway.wire.messages import Delta, PositionLogprobs, RequestTimings, TokenLogprob

REQUEST_FAILED = "the engine failed to process this request"
NOTHING_FOUND = "stop_token_ids and min_tokens leave no token that a search could go on with"
NO_ERRORS: Mapping[str, str] = {}


def add_deltas(
    deltas: list[Delta], output: RequestOutput, errors: Mapping[str, str] = NO_ERRORS, *, is_silent: bool
) -> None:
    """Append a delta for each completion that changed; the last delta of an ended request is marked. `errors` has the
    failures that may be shown to the client; the failure of a whole step goes to the log only. `is_silent`: the request
    gave no output before its end, because its completions were compared with each other."""
    request_id = output.request_id
    if not output.outputs:
        deltas.append(failure(request_id, NOTHING_FOUND, status=400, param="stop_token_ids"))
        return
    for new in output.outputs:
        delta = Delta(request_id, new.index, new.text, new.token_ids)
        if new.logprobs is not None:
            delta.logprobs = list(map(_position, new.logprobs))
        if is_silent:
            delta.cumulative_logprob = new.cumulative_logprob
        if new.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = new.finish_reason, new.stop_reason
            if new.finish_reason == "error":
                why = errors.get(request_id)
                if why is not None and why.startswith(REFUSAL):  # its grammar was too much for the matcher
                    delta.error, delta.error_status = why, 400
                else:
                    delta.error = REQUEST_FAILED if why is None else f"{REQUEST_FAILED}: {why}"
        deltas.append(delta)
    if output.prompt_logprobs is not None:
        positions = [None if found is None else _position(found) for found in output.prompt_logprobs]
        deltas[-len(output.outputs)].prompt_logprobs = positions
    if output.finished:
        deltas[-1].is_last = True
        if output.embedding is not None:
            deltas[-1].embedding = output.embedding.tobytes()
        deltas[-1].timings = _timings(output.metrics, output.num_cached_tokens)


def failure(request_id: str, message: str, *, status: int, param: str | None = None) -> Delta:
    """The last delta of a request that failed, or the only one of a refused request."""
    return Delta(
        request_id,
        finish_reason="error",
        error=message,
        is_last=True,
        timings=RequestTimings(),
        error_status=status,
        error_param=param,
    )


def _position(found: LogprobsOfOnePosition) -> PositionLogprobs:
    return [TokenLogprob(token_id, each.logprob, each.rank, each.decoded_token) for token_id, each in found.items()]


def _timings(metrics: RequestMetrics | None, num_cached_tokens: int) -> RequestTimings:
    """The durations of a request's phases. A phase that it did not reach took no time. The same holds for the prefill
    of a request that continues from another engine, as it had its first token before its first step here."""
    assert metrics is not None and metrics.finished_s is not None
    scheduled_s = metrics.finished_s if metrics.first_scheduled_s is None else metrics.first_scheduled_s
    first_token_s = metrics.finished_s if metrics.first_token_s is None else metrics.first_token_s
    first_token_s = max(first_token_s, scheduled_s)
    return RequestTimings(
        queue_s=scheduled_s - metrics.arrival_time_s,
        prefill_s=first_token_s - scheduled_s,
        decode_s=metrics.finished_s - first_token_s,
        num_preemptions=metrics.num_preemptions,
        num_cached_tokens=num_cached_tokens,
    )
