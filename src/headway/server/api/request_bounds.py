"""Limits that this server sets on requests, in addition to the validity rules of `RequestPreparer`.

They keep the work for one request, in the server's event loop and in the engine, from delaying other requests.
"""

from __future__ import annotations

from typing import Any

from headway.sampling_params import SamplingParams
from headway.server.admission.service_classes import Scheduling
from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import SAMPLING_NAMES
from headway.server.api.requests import ChatCompletionRequest, GenerationRequest
from headway.server.limits import LIMITS
from headway.server.services import Services
from headway.wire.messages import EngineReady


def check_prompt_logprobs(params: SamplingParams, *, num_tokens: int) -> None:
    """Raise 400 if prompts with `num_tokens` tokens in total would return too many log-probabilities."""
    if params.prompt_logprobs is None:
        return
    number = (1 + params.prompt_logprobs) * num_tokens
    if number > LIMITS.max_prompt_logprobs:
        raise bad_request(
            f"The request asks for {number} log-probabilities of its prompts' tokens; there may be "
            f"{LIMITS.max_prompt_logprobs}. Ask for fewer alternatives, or send fewer prompts at once.",
            param="prompt_logprobs",
        )


def check_request(request: GenerationRequest, services: Services) -> None:
    """Run the checks that do not need the prompt. Those that bound the work of later checks come first."""
    services.check_model(request.model)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    _check_texts("stop", stop, most=LIMITS.max_stop_strings)
    _check_texts("bad_words", request.bad_words, most=LIMITS.max_list_items)
    for name in SAMPLING_NAMES:
        value = getattr(request, name)
        if isinstance(value, list | dict) and len(value) > LIMITS.max_list_items:
            raise bad_request(f"'{name}' may have at most {LIMITS.max_list_items} entries.", param=name)
    request.check_supported()
    if request.priority and services.info.scheduling_policy != "priority":
        raise bad_request(
            "'priority' needs a server that was started with --scheduling-policy priority.",
            param="priority",
            code="unsupported_field",
        )
    _check_cache(request, services.info)
    if request.prompt_logprobs is not None and request.stream:
        raise bad_request("'prompt_logprobs' cannot be streamed.", param="prompt_logprobs")
    check_top("prompt_logprobs", request.prompt_logprobs)


def _check_texts(name: str, texts: list[str] | None, *, most: int) -> None:
    lengths = [len(text) for text in (texts or ())[: most + 1]]
    if len(lengths) > most or max(lengths, default=0) > LIMITS.max_stop_chars or sum(lengths) > LIMITS.max_all_chars:
        raise bad_request(
            f"'{name}' may have {most} strings of at most {LIMITS.max_stop_chars} characters, and "
            f"{LIMITS.max_all_chars} together.",
            param=name,
        )


def _check_cache(request: GenerationRequest, info: EngineReady) -> None:
    for name in ("cache_salt", "cache_ttl_s"):
        if getattr(request, name) and not info.prefix_caching:
            raise bad_request(
                f"'{name}' needs a prefix cache, and this server was started with --no-enable-prefix-caching.",
                param=name,
                code="unsupported_field",
            )


def chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """Return how many alternatives per token a chat request asks for, or None if it asks for no log-probabilities."""
    check_top("top_logprobs", request.top_logprobs)
    if request.logprobs or (request.logprob_token_ids and request.logprobs is None):
        return request.top_logprobs or 0
    if request.logprob_token_ids:
        raise bad_request("'logprob_token_ids' needs 'logprobs': true.", param="logprob_token_ids")
    if request.top_logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None


def check_top(name: str, value: int | None) -> None:
    """Raise 400 if a request asks for more alternatives per token than the server returns."""
    if value is not None and not 0 <= value <= LIMITS.max_top_logprobs:
        raise bad_request(f"'{name}' must be from 0 to {LIMITS.max_top_logprobs}.", param=name)


def check_params(
    values: dict[str, Any], services: Services, scheduling: Scheduling, *, num_prompts: int, stream: bool
) -> SamplingParams:
    """Return the sampling parameters, after the engine's own checks: here a failure still gets its own HTTP status.
    Also refuse a request that could never fit into the queue, before its prompts are tokenised."""
    checked = SamplingParams(**values)
    services.prompts.preparer(services.info).check_params(checked)
    if stream:
        checked.check_can_stream()
    if checked.use_beam_search:
        _check_search(checked, services.info)
    num_sequences, most = checked.num_choices * num_prompts, services.max_waiting(scheduling.service_class)
    if num_sequences > most:
        kind = "beams" if checked.use_beam_search else "completions"
        raise bad_request(
            f"The request asks for {num_sequences} {kind}; at most {most} can wait here.",
            param=_width_name(checked) if checked.num_choices > 1 else "prompt",
        )
    return checked


def _check_search(params: SamplingParams, info: EngineReady) -> None:
    most = min(LIMITS.max_beams, info.vocab_size)
    if params.num_choices > most:
        name = _width_name(params)
        raise bad_request(f"'{name}' may be at most {most} with 'use_beam_search'.", param=name)
    if len(params.extra_stop_token_ids) > LIMITS.max_beams:
        raise bad_request(
            f"'stop_token_ids' may have at most {LIMITS.max_beams} entries with 'use_beam_search'.",
            param="stop_token_ids",
        )


def _width_name(params: SamplingParams) -> str:
    """Return the name of the field that sets the number of sequences."""
    return "n" if params.best_of is None else "best_of"
