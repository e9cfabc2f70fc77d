"""Turns requests into jobs: validated work, with prompts as token ids and sampling parameters the engine accepts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.core.request_options import RequestOptions
from headway.errors import InvalidRequestError
from headway.outputs import check_dimensions
from headway.sampling_params import SamplingParams, StructuredOutputsParams
from headway.server.admission.service_classes import Scheduling
from headway.server.api.api_errors import ApiError, as_sent, bad_request, from_exception, under_name
from headway.server.api.prompts import Prompt, PromptMaker
from headway.server.api.record_fields import sampling_values
from headway.server.api.request_bounds import (
    chat_logprobs,
    check_params,
    check_prompt_logprobs,
    check_request,
    check_top,
)
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


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one HTTP request: `n` completions of each prompt, possibly the best of a larger number."""

    prompts: list[Prompt]
    params: SamplingParams
    """Parameters shared by all prompts, including the token sequences of `bad_words`."""
    options: RequestOptions
    stream: bool
    include_usage: bool
    continuous_usage: bool
    num_logprobs: int | None = None
    """How many alternatives per token to return; None for no log-probabilities."""
    wants_prompt_logprobs: bool = False
    """Whether to return vLLM's separate field with the log-probabilities of the prompt."""
    echo: bool = False
    hide_output: bool = False
    """Whether only the prompt matters, because `max_tokens` is 0 or the request is for embeddings. The engine still
    generates one token, which is not delivered."""
    answer: OutputSpec = PLAIN
    """What the output may contain, and how calls and reasoning are separated from text."""
    constraint_path: str | None = None
    """The request field that constrains the output. The engine's errors call it `structured_outputs`."""
    return_token_ids: bool = False
    """Whether to return the token ids of prompts and completions in addition to their text."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens by their ids."""

    @property
    def is_plain(self) -> bool:
        """Whether the whole output is text, with no reasoning or tool calls to separate."""
        return not self.answer.tools and self.answer.reasoning is None

    @property
    def n(self) -> int:
        """Number of completions returned for each prompt."""
        return self.params.n

    @property
    def is_silent(self) -> bool:
        """Whether the engine reports only progress until the end, because the sequences to return are not known yet."""
        return not self.params.can_stream

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_sequences(self) -> int:
        """Number of sequences the engine generates for this job."""
        return self.params.num_choices * len(self.prompts)


async def chat_job(request: ChatCompletionRequest, scheduling: Scheduling, services: Services) -> Job:
    """Check a chat request and turn its messages into tokens."""
    check_request(request, services)
    if request.max_tokens is not None and request.max_completion_tokens not in (None, request.max_tokens):
        raise bad_request("'max_tokens' and 'max_completion_tokens' differ; send one of them.", param="max_tokens")
    num_logprobs = chat_logprobs(request)
    max_tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    values = sampling_values(request) | {
        "max_tokens": max_tokens,
        "logprobs": num_logprobs if request.logprobs else None,
    }
    params = check_params(values, services, scheduling, num_prompts=1, stream=bool(request.stream))
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
    check_request(request, services)
    check_top("logprobs", request.logprobs)
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
    params = check_params(values, services, scheduling, num_prompts=num_prompts(request), stream=bool(request.stream))
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
    """Check an embedding request and tokenise its prompts like those of a completion."""
    check_dimensions(given.dimensions, services.info.hidden_size)
    params = SamplingParams.for_embedding(given.pooling or "mean")
    try:
        job = await completion_job(request, scheduling, services)
    except (ApiError, InvalidRequestError) as error:
        raise under_name(from_exception(error), "prompt", "input") from error
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
    check_prompt_logprobs(params, num_tokens=sum(len(prompt.token_ids) for prompt in prompts))
    return Job(
        prompts=prompts,
        params=await services.prompts.spell(params, services.info),
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
    """Return the number of tokens a prompt is truncated to, or None. -1 leaves room for `max_tokens` tokens of output
    if that is less than the context."""
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
    """The form of the output, and the sampling parameters that enforce it."""

    answer: OutputSpec
    params: SamplingParams


async def _shaped(
    answer: OutputSpec,
    params: SamplingParams,
    constraint: Constraint | None,
    scheduling: Scheduling,
    services: Services,
) -> _Shaped:
    """Return the output's form and the parameters with their grammar. The expensive part runs in a helper process."""
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
    """Return `params` with `StructuredOutputsParams(**values)`. Errors in the values name the request's `path`."""
    try:
        structured = StructuredOutputsParams(**values)
        check_bounds(structured)
        return dataclasses.replace(params, structured_outputs=structured)
    except InvalidRequestError as error:
        raise as_sent(bad_request(str(error), param=error.param), path) from error


def _constraint_path(answer: OutputSpec, constraint: Constraint | None) -> str | None:
    """Return the field that an error in the grammar belongs to. Tool schemas were checked one by one before, so with
    both tools and a constraint it is the constraint."""
    if constraint is not None:
        return constraint.path
    return "tools" if answer.tools else None


def num_prompts(request: GenerationRequest) -> int:
    """Return the number of prompts of a request. A conversation counts as one."""
    if not isinstance(request, CompletionRequest):
        return 1
    given = request.prompt
    return 1 if isinstance(given, str) or (given and isinstance(given[0], int)) else len(given)


async def _prompts(
    request: CompletionRequest, maker: PromptMaker, info: EngineReady, *, add_special: bool, most_tokens: int | None
) -> list[Prompt]:
    """Tokenise `prompt`, which is a string, a list of strings, token ids, or lists of token ids, but no mixture."""
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
