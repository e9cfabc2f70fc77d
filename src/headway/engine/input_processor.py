"""From what a user sends to what the scheduler queues: everything is checked here, before anything is queued."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headway.config import did_you_mean
from headway.core import Request
from headway.core.request_options import DEFAULT_OPTIONS, OPTION_NAMES, RequestOptions
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.sampling_params import MAX_LOGPROBS, SamplingParams
from headway.structured.grammars import grammar_of
from headway.tokenizer import Tokenizer, spell_bad_words

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list, or an array or tensor with one dimension), or either in a dict: see `PromptParts`."""


@dataclass(frozen=True)
class PromptParts:
    """A prompt in the forms that vLLM's users know: `{"prompt": text}` or `{"prompt_token_ids": ids}`.

    With both, the ids count and the text is what outputs show as the prompt. `{"cache_salt": ...}` may be added, in
    place of the option. None means that something is not given.
    """

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> PromptParts:
        """`InvalidRequestError` if it is no prompt, or one with images or embeddings."""
        if isinstance(prompt, str):
            return cls(prompt, None)
        if not isinstance(prompt, Mapping):
            return cls(None, prompt)
        given = {name: value for name, value in prompt.items() if value is not None}
        for name in given:
            if name not in _PROMPT_KEYS:
                known = ", ".join(repr(key) for key in _PROMPT_KEYS)
                raise InvalidRequestError(f"A prompt cannot have {name!r}; a dict may have {known}.", param="prompt")
        text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(
                f"'prompt' in a prompt must be a string, not {type(text).__name__}; token ids are 'prompt_token_ids'.",
                param="prompt",
            )
        if text is None and token_ids is None:
            raise InvalidRequestError("A dict needs 'prompt' or 'prompt_token_ids' to be a prompt.", param="prompt")
        return cls(text, token_ids, given.get("cache_salt"))


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a dict, or token ids are one."""
    if isinstance(prompts, str | Mapping) or _is_array(prompts):
        return [cast(Prompt, prompts)]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable) or _is_scalar(prompts):
        raise InvalidRequestError(
            f"prompts must be text, token ids, a dict, or a list of these, not {type(prompts).__name__}.",
            param="prompts",
        )
    many: list[Any] = list(prompts)
    if not many:
        raise InvalidRequestError("There is no prompt: the list of prompts or of token ids is empty.", param="prompts")
    if any(isinstance(item, str) or (isinstance(item, Iterable) and not _is_scalar(item)) for item in many):
        return many
    return [many]


def options_each(
    count: int, options: RequestOptions | Sequence[RequestOptions] | None, named: Mapping[str, Any]
) -> list[RequestOptions]:
    """The options of each request, where they are given once or one each, as records or by their names."""
    for name in named:
        if name not in OPTION_NAMES:
            known = f" The options are: {', '.join(OPTION_NAMES)}."
            raise InvalidRequestError(
                f"There is no option '{name}'.{did_you_mean(name, OPTION_NAMES) or known}", param=name
            )
    records: list[RequestOptions] = one_each(options or DEFAULT_OPTIONS, count, "options", RequestOptions)
    if not named:
        return records
    columns = [one_each(value, count, name, str) for name, value in named.items()]
    return [
        dataclasses.replace(record, **dict(zip(named, own, strict=True)))
        for record, own in zip(records, zip(*columns, strict=True), strict=True)
    ]


def one_each(value: Any, count: int, name: str, kind: type) -> list[Any]:
    """A value for all prompts, or one each, as a list. A dict is one value, of a kind that the check of values refuses,
    and not a list of its keys."""
    if isinstance(value, (kind, Mapping)) or not hasattr(value, "__iter__"):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{len(values)} {name} for {count} prompts; give one, or one each.", param=name)
    return values


def core_id(request_id: str, index: int | None = None) -> str:
    """What the scheduler knows a request by, or its completion or beam of this number.

    "#" divides the two. A "#" of the caller's own is doubled, so that no request has the id of another one's part.
    """
    escaped = request_id.replace("#", "##") if "#" in request_id else request_id
    return escaped if index is None else f"{escaped}#{index}"


GRAMMARS_KEPT = 8
SPELLINGS_KEPT = 8
"""Lists of bad words whose tokens are remembered: all prompts of a call have the same, and they are spelt once."""


@dataclass(frozen=True)
class PreparedRequest:
    """A request that is known to be good. It has one child, a sequence of its own, per completion that is made; for a
    beam search there is one, which is not run itself: it says how long a beam may get, and what all have in common."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    children: tuple[Request, ...]

    @property
    def options(self) -> RequestOptions:
        """What it asks of the scheduler and the cache."""
        return self.children[0].options


class InputProcessor:
    """Tokenises and validates. Knows nothing of the requests before, but for how their bad words are spelt."""

    def __init__(self, *, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._grammar_of = functools.lru_cache(GRAMMARS_KEPT)(grammar_of)
        self._spell = functools.lru_cache(SPELLINGS_KEPT)(self._spell_bad_words)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> PreparedRequest:
        """Check everything about a request; `InvalidRequestError` says what is wrong with it."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, not {request_id!r}.", param="request_id")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}.", param="sampling_params"
            )
        if not isinstance(options, RequestOptions):
            raise InvalidRequestError(f"options must be RequestOptions, not {type(options).__name__}.", param="options")
        parts = PromptParts.of(prompt)
        if parts.cache_salt is not None:
            options = dataclasses.replace(options, cache_salt=parts.cache_salt)
        prompt_token_ids = self._tokenize(parts)
        params = self._resolve(params, num_prompt_tokens=len(prompt_token_ids))
        return PreparedRequest(
            request_id=request_id,
            prompt=parts.text,
            prompt_token_ids=prompt_token_ids,
            params=params,
            children=self._children(request_id, prompt_token_ids, params, options),
        )

    def with_options(self, request: PreparedRequest, options: RequestOptions) -> PreparedRequest:
        """The same request with other options. It must not have been queued."""
        children = self._children(request.request_id, request.prompt_token_ids, request.params, options)
        return dataclasses.replace(request, children=children)

    def _children(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams, options: RequestOptions
    ) -> tuple[Request, ...]:
        num_children = 1 if params.use_beam_search else params.num_choices
        return tuple(
            self._child(
                core_id(request_id, None if num_children == 1 else index),
                prompt_token_ids,
                params.for_choice(index),
                options,
            )
            for index in range(num_children)
        )

    def _tokenize(self, prompt: PromptParts) -> tuple[int, ...]:
        if prompt.text is not None and prompt.token_ids is None:
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "This model has no tokenizer, so a prompt must be a list of token ids.", param="prompt"
                )
            token_ids = tuple(self.tokenizer.encode(prompt.text))
        else:
            token_ids = _as_token_ids(prompt.token_ids)
        if not token_ids:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequestError(
                f"Token id {wrong} is outside the vocabulary (0 to {self.vocab_size - 1}).", param="prompt"
            )
        if len(token_ids) >= self.max_model_len:
            raise RequestTooLargeError(
                f"The prompt has {len(token_ids)} tokens; with at least one token of output, at most "
                f"{self.max_model_len - 1} fit into the context of {self.max_model_len}.",
                param="prompt",
            )
        return token_ids

    def _resolve(self, params: SamplingParams, *, num_prompt_tokens: int) -> SamplingParams:
        """Settle what depends on the model: the room left for output, token ids, how bad words are spelt."""
        params.validate_for_vocabulary(self.vocab_size)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise InvalidRequestError("stop and bad_words need a tokenizer, and this model has none.", param="stop")
        if params.use_beam_search:
            self._check_width(params)
        params = params.within(self.max_model_len - num_prompt_tokens)
        if params.bad_words and params.bad_word_token_ids is None:
            params = params.with_bad_word_token_ids(self._spell(tuple(params.bad_words)))
        if params.structured_outputs is not None and params.grammar is None:
            params = params.with_grammar(self._grammar_of(params.structured_outputs))
        if params.bad_word_token_ids:
            params.validate_for_vocabulary(self.vocab_size)  # the tokenizer may know tokens that the model does not
        return params

    def _spell_bad_words(self, words: tuple[str, ...]) -> list[list[int]]:
        assert self.tokenizer is not None
        return spell_bad_words(words, self.tokenizer)

    def _check_width(self, params: SamplingParams) -> None:
        """Each beam is asked for as many logprobs as there are beams and tokens that end one."""
        num_stops = len(self._stop_token_ids(params))
        if params.num_choices + num_stops > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"Beam search with {params.num_choices} beams and {num_stops} end-of-sequence and stop tokens is too "
                f"wide: together they may be {MAX_LOGPROBS}.",
                param="n" if params.best_of is None else "best_of",
            )

    def _child(
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams, options: RequestOptions
    ) -> Request:
        assert params.max_tokens is not None
        return Request(
            request_id,
            prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=self._stop_token_ids(params),
            sampling_params=params,
            reads_cache=params.prompt_logprobs is None and params.pooling != "mean",
            can_draft=not (params.is_guided and (params.ignore_eos or params.min_tokens)),  # its guide may end it
            can_draft_ahead=not params.bad_words and not params.min_tokens,
            is_guided=params.is_guided,
            options=options,
        )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))


def _as_token_ids(prompt: Any) -> tuple[int, ...]:
    """Accept any sequence of whole numbers (list, tuple, array, tensor); nothing that merely looks like one."""
    if _is_array(prompt):
        return _array_ids(prompt)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise InvalidRequestError(
            f"A prompt is a string, a list of token ids or a dict, not {type(prompt).__name__}.", param="prompt"
        )
    if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
        return tuple(prompt)
    token_ids = []
    for item in prompt:
        token_id = item.tolist() if _is_scalar(item) else item
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidRequestError(f"A prompt's token ids must be whole numbers, not {token_id!r}.", param="prompt")
        token_ids.append(token_id.__index__())
    return tuple(token_ids)


def _array_ids(array: Any) -> tuple[int, ...]:
    kind, shape = f"{type(array).__module__.partition('.')[0]} {type(array).__name__}", tuple(array.shape)
    if len(shape) != 1:
        raise InvalidRequestError(
            f"Token ids must have one dimension, and this {kind} has {len(shape)}, {list(shape)}; give a list of "
            "prompts.",
            param="prompt",
        )
    token_ids = array.tolist()
    if any(type(token_id) is not int for token_id in token_ids):
        raise InvalidRequestError(
            f"A prompt's token ids must be whole numbers, and this {kind} is of {array.dtype}.", param="prompt"
        )
    return tuple(token_ids)


def _is_array(value: object) -> bool:
    """A numpy array or a torch tensor of numbers, or what is like one, with dimensions."""
    if not hasattr(value, "tolist") or not hasattr(value, "dtype") or getattr(value, "ndim", 0) == 0:
        return False
    return getattr(value.dtype, "kind", "") not in ("O", "S", "U")  # an array of strings is a list of them


def _is_scalar(value: object) -> bool:
    """An element of an array, which may call itself iterable and have an index whatever it is."""
    return hasattr(value, "tolist") and getattr(value, "ndim", None) == 0
