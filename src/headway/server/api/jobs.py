"""A request that is known to be good: prompts as token ids, and sampling parameters that the engine will accept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.core.request_options import RequestOptions
from headway.errors import InvalidRequestError
from headway.outputs import check_dimensions
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.server.admission.service_classes import Scheduling
from headway.server.api.api_errors import ApiError, as_sent, bad_request, under_name
from headway.server.api.prompts import Prompt, PromptMaker
from headway.server.api.record_fields import SAMPLING_NAMES, sampling_values
from headway.server.api.requested_output import (
    PLAIN,
    Constraint,
    check_no_search,
    output_spec,
    shape_job,
    template_options,
    tools_of,
    with_shape,
)
from headway.server.api.requests import ChatCompletionRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from headway.server.services import Services
from headway.structured.grammars import check_bounds
from headway.structured.output_spec import OutputSpec
from headway.wire.messages import EngineReady

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_ALL_CHARS = 8192
"""Of all stop strings of a request together, and of all bad words."""
MAX_LIST_ITEMS = 1024
MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of prompts in one answer: more would take the engine's loop longer than others should wait."""
MAX_BEAMS = 64
"""Also of `stop_token_ids` with a search. To rank the continuations of so many beams takes 5 ms, in which all wait."""


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's work: `n` completions of each of its prompts, perhaps the best of more."""

    prompts: list[Prompt]
    params: SamplingParams
    """The same for all prompts, with how `bad_words` are spelt."""
    options: RequestOptions
    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_logprobs: int | None = None
    """How many alternatives per token to report; None: no log-probabilities."""
    wants_prompt_logprobs: bool = False
    """In vLLM's form, as a field of their own."""
    echo: bool = False
    hide_output: bool = False
    """Only the prompt is wanted: `max_tokens` was 0, or it is for a vector. The engine makes one token all the same,
    which is not shown."""
    answer: OutputSpec = PLAIN
    """What may come, and how calls and thoughts are told from text."""
    constraint_path: str | None = None
    """The field of the request that says what the answer must match; the engine knows it as `structured_outputs`."""
    return_token_ids: bool = False
    """Whether the tokens of prompts and completions are told besides their text."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""

    @property
    def is_plain(self) -> bool:
        """Whether all that the model writes is the answer's text."""
        return not self.answer.tools and self.answer.reasoning is None

    @property
    def n(self) -> int:
        """Completions of each prompt that are returned."""
        return self.params.n

    @property
    def is_silent(self) -> bool:
        """Nothing but progress is told before the end, because which tokens are returned is not known."""
        return not self.params.can_stream

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_sequences(self) -> int:
        """What the engine has to do for it."""
        return self.params.num_choices * len(self.prompts)


async def chat_job(request: ChatCompletionRequest, scheduling: Scheduling, services: Services) -> Job:
    """Check a chat request and turn its messages into tokens."""
    _check(request, services)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_tokens")
    num_logprobs = _chat_logprobs(request)
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    values = sampling_values(request) | {
        "max_tokens": max_tokens,
        "logprobs": num_logprobs if request.logprobs else None,
    }
    params = _check_params(values, services, scheduling, num_prompts=1, stream=bool(request.stream))
    constraint, tools = Constraint.of_request(request), tools_of(request)
    check_no_search(request, constraint, has_tools=bool(tools))
    prompt = await services.prompts.from_messages(
        request.messages,
        services.info,
        tools=tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        template_options=template_options(request, services.prompts.template_source),
        most_tokens=_most_tokens(request, params, services.info),
    )
    answer = output_spec(request, services.formats, prompt_text=prompt.text or "")
    shaped = await _shaped(answer, params, constraint, scheduling, services)
    return await _job(
        request,
        [prompt],
        shaped.params,
        services,
        options=scheduling.options,
        num_logprobs=num_logprobs,
        answer=shaped.answer,
        constraint_path=_constraint_path(shaped.answer, constraint),
    )


async def completion_job(request: CompletionRequest, scheduling: Scheduling, services: Services) -> Job:
    """Check a completion request and tokenise its prompts."""
    _check(request, services)
    _check_top("logprobs", request.logprobs)
    echo, hide_output = bool(request.echo), request.max_tokens == 0
    if hide_output and not echo:
        raise bad_request("'max_tokens' must be at least 1, unless 'echo' is true.", param="max_tokens")
    if echo and request.stream and (request.logprobs is not None or request.logprob_token_ids):
        raise bad_request("Log-probabilities of an echoed prompt cannot be streamed.", param="echo")
    max_tokens = 16 if request.max_tokens is None else request.max_tokens or 1
    num_logprobs = 0 if request.logprobs is None and request.logprob_token_ids else request.logprobs
    values = sampling_values(request) | {"max_tokens": max_tokens, "logprobs": request.logprobs}
    if num_logprobs is not None and echo:
        values["prompt_logprobs"] = max(num_logprobs, request.prompt_logprobs or 0)
    params = _check_params(values, services, scheduling, num_prompts=num_prompts(request), stream=bool(request.stream))
    constraint = Constraint.of_request(request)
    check_no_search(request, constraint)
    params = (await _shaped(PLAIN, params, constraint, scheduling, services)).params
    prompts = await _prompts(
        request,
        services.prompts,
        services.info,
        add_special=request.add_special_tokens is not False,
        most_tokens=_most_tokens(request, params, services.info),
    )
    end_token_id = prompts[0].end_token_id
    if end_token_id is not None and not params.ignore_eos:
        params = dataclasses.replace(params, stop_token_ids=(*params.extra_stop_token_ids, end_token_id))
    return await _job(
        request,
        prompts,
        params,
        services,
        options=scheduling.options,
        num_logprobs=num_logprobs,
        echo=echo,
        hide_output=hide_output,
        constraint_path=_constraint_path(PLAIN, constraint),
    )


async def embedding_job(
    given: EmbeddingRequest, request: CompletionRequest, scheduling: Scheduling, services: Services
) -> Job:
    """Check a request for vectors; its prompts are tokenised as those of a completion."""
    check_dimensions(given.dimensions, services.info.hidden_size)
    params = SamplingParams.for_embedding(given.pooling or "mean")
    try:
        job = await completion_job(request, scheduling, services)
    except ApiError as error:
        raise under_name(error, "prompt", "input") from error
    return dataclasses.replace(job, params=params, hide_output=True)


async def _job(
    request: GenerationRequest,
    prompts: list[Prompt],
    params: SamplingParams,
    services: Services,
    *,
    options: RequestOptions,
    num_logprobs: int | None,
    echo: bool = False,
    hide_output: bool = False,
    answer: OutputSpec = PLAIN,
    constraint_path: str | None = None,
) -> Job:
    _check_prompt_logprobs(params, prompts)
    if params.bad_words:
        params = params.with_bad_word_token_ids(await services.prompts.bad_words(params.bad_words))
    return Job(
        prompts=prompts,
        params=params,
        options=options,
        stream=bool(request.stream),
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        num_logprobs=num_logprobs,
        wants_prompt_logprobs=request.prompt_logprobs is not None,
        echo=echo,
        hide_output=hide_output,
        answer=answer,
        constraint_path=constraint_path,
        return_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )


def _most_tokens(request: GenerationRequest, params: SamplingParams, info: EngineReady) -> int | None:
    """How many tokens a prompt is cut to. -1 leaves room for the output that is asked for, if it leaves any."""
    wanted, most = request.truncate_prompt_tokens, info.max_model_len
    if wanted is None:
        return None
    if wanted >= most:
        raise bad_request(
            f"'truncate_prompt_tokens' may be at most {most - 1}: this model's context has {most} tokens.",
            param="truncate_prompt_tokens",
        )
    if wanted != -1:
        return int(wanted)
    return most - (params.max_tokens if params.max_tokens is not None and params.max_tokens < most else 1)


class _Shaped(NamedTuple):
    """What an answer may look like, and the parameters that see to it."""

    answer: OutputSpec
    params: SamplingParams


async def _shaped(
    answer: OutputSpec,
    params: SamplingParams,
    constraint: Constraint | None,
    scheduling: Scheduling,
    services: Services,
) -> _Shaped:
    """The answer and its parameters with the grammar; what takes work is done in another process."""
    grammar = None
    if constraint is not None or answer.callable_tools:
        path = _constraint_path(answer, constraint) or "structured_outputs"
        if constraint is not None:
            params = _with_structured_outputs(params, constraint.values, path=constraint.path)
        try:
            shape = await services.shaper.shape(
                shape_job(answer, params.structured_outputs, services.formats), client=scheduling.client
            )
        except InvalidRequestError as error:
            raise as_sent(bad_request(str(error), param=error.param), path) from error
        answer, grammar = with_shape(answer, shape), shape.grammar
    if services.formats.shows_special_tokens(answer) and params.skip_special_tokens:
        params = dataclasses.replace(params, skip_special_tokens=False)
    if grammar is not None:
        if params.structured_outputs is None:
            params = _with_structured_outputs(params, {"grammar": grammar}, path=path)
        params = params.with_grammar(grammar, shape.num_bytes)
    return _Shaped(answer, params)


def _with_structured_outputs(params: SamplingParams, values: dict[str, Any], *, path: str) -> SamplingParams:
    """`values` are fields of `StructuredOutputsParams`; what is wrong with them is wrong with the request's `path`."""
    try:
        structured = StructuredOutputsParams(**values)
        check_bounds(structured)
        return dataclasses.replace(params, structured_outputs=structured)
    except InvalidRequestError as error:
        raise as_sent(bad_request(str(error), param=error.param), path) from error


def _constraint_path(answer: OutputSpec, constraint: Constraint | None) -> str | None:
    """Schemas of tools have been looked at one by one, so with both it is the text's form that may be wrong."""
    if constraint is not None:
        return constraint.path
    return "tools" if answer.tools else None


def _check_prompt_logprobs(params: SamplingParams, prompts: list[Prompt]) -> None:
    if params.prompt_logprobs is None:
        return
    number = (1 + params.prompt_logprobs) * sum(len(prompt.token_ids) for prompt in prompts)
    if number > MAX_PROMPT_LOGPROBS:
        raise bad_request(
            f"The request asks for {number} log-probabilities of its prompts' tokens; there may be "
            f"{MAX_PROMPT_LOGPROBS}. Ask for fewer alternatives, or send fewer prompts at once.",
            param="prompt_logprobs",
        )


def _check(request: GenerationRequest, services: Services) -> None:
    """What can be said without looking at the prompt; first whatever bounds the work of the checks that follow."""
    services.check_model(request.model)
    _check_texts("stop", [request.stop] if isinstance(request.stop, str) else request.stop, most=MAX_STOP_STRINGS)
    _check_texts("bad_words", request.bad_words, most=MAX_LIST_ITEMS)
    for name in SAMPLING_NAMES:
        value = getattr(request, name)
        if isinstance(value, list | dict) and len(value) > MAX_LIST_ITEMS:
            raise bad_request(f"'{name}' may have at most {MAX_LIST_ITEMS} entries.", param=name)
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
    _check_top("prompt_logprobs", request.prompt_logprobs)


def _check_texts(name: str, texts: list[str] | None, *, most: int) -> None:
    lengths = [len(text) for text in (texts or ())[: most + 1]]
    if len(lengths) > most or max(lengths, default=0) > MAX_STOP_CHARS or sum(lengths) > MAX_ALL_CHARS:
        raise bad_request(
            f"'{name}' may have {most} strings of at most {MAX_STOP_CHARS} characters, and {MAX_ALL_CHARS} together.",
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


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    _check_top("top_logprobs", request.top_logprobs)
    if request.logprobs or (request.logprob_token_ids and request.logprobs is None):
        return request.top_logprobs or 0
    _check_wants_logprobs(request)
    if request.top_logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    return None


def _check_wants_logprobs(request: ChatCompletionRequest) -> None:
    """Those of named tokens are told with those of the chosen ones."""
    if request.logprob_token_ids:
        raise bad_request("'logprob_token_ids' needs 'logprobs': true.", param="logprob_token_ids")


def _check_top(name: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= MAX_TOP_LOGPROBS:
        raise bad_request(f"'{name}' must be from 0 to {MAX_TOP_LOGPROBS}.", param=name)


def _check_params(
    values: dict[str, Any], services: Services, scheduling: Scheduling, *, num_prompts: int, stream: bool
) -> SamplingParams:
    """The parameters, or what the engine would raise, while it can still be answered with a status of its own; and what
    would never fit into the queue, before it is tokenised."""
    checked = SamplingParams(**values)
    checked.validate_for_vocabulary(services.info.vocab_size)
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
    most = min(MAX_BEAMS, info.vocab_size)
    if params.num_choices > most:
        name = _width_name(params)
        raise bad_request(f"'{name}' may be at most {most} with 'use_beam_search'.", param=name)
    if len(params.extra_stop_token_ids) > MAX_BEAMS:
        raise bad_request(
            f"'stop_token_ids' may have at most {MAX_BEAMS} entries with 'use_beam_search'.", param="stop_token_ids"
        )


def _width_name(params: SamplingParams) -> str:
    """The field that says how many sequences are made."""
    return "n" if params.best_of is None else "best_of"


def num_prompts(request: GenerationRequest) -> int:
    """How many prompts a request has; a conversation is one."""
    if not isinstance(request, CompletionRequest):
        return 1
    given = request.prompt
    return 1 if isinstance(given, str) or (given and isinstance(given[0], int)) else len(given)


async def _prompts(
    request: CompletionRequest, maker: PromptMaker, info: EngineReady, *, add_special: bool, most_tokens: int | None
) -> list[Prompt]:
    """A string, strings, token ids, or lists of token ids: nothing in between."""
    given: list[Any] = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    kinds = set(map(type, given))
    if not given:
        raise bad_request("'prompt' is empty.", param="prompt")
    if request.suffix and kinds == {str}:
        return await maker.between(given, request.suffix, info, add_special_tokens=add_special)
    if request.suffix:
        raise bad_request("'suffix' goes with prompts of text only.", param="suffix")
    if kinds == {int}:
        return await maker.from_ids([given], info, most_tokens=most_tokens)
    if kinds == {list}:
        return await maker.from_ids(given, info, most_tokens=most_tokens)
    if kinds == {str}:
        return await maker.from_texts(given, info, add_special_tokens=add_special, most_tokens=most_tokens)
    raise bad_request("'prompt' must be a string, strings, token ids, or lists of token ids.", param="prompt")
