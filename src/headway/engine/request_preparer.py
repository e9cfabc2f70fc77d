"""Checks users' requests and prepares them for the scheduler: one set of checks for every entry point.

    LLM         text or ids ──► prepare ──────────────────────────────────────────────────────► scheduler
    AsyncLLM    text or ids ──► prepare ─────────────────────────┐
    HTTP        body ──► its bounds ──► the checks one by one ───┴──► engine process: prepare ──► scheduler

Work that grows with the length of a text (tokenising, spelling bad words, parsing a grammar) is done where the request
comes in: in the caller's thread, or in a thread beside the event loop. The engine process does not repeat it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core import Request
from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.engine.prompt_forms import Prompt, PromptParts, as_token_ids
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.predict import PromptView
from headway.sampling_params import MAX_LOGPROBS, SamplingParams
from headway.structured.conversation import chat_text, tools_from
from headway.structured.grammars import grammar_of
from headway.tokenizer import Tokenizer, spell_bad_words

GRAMMARS_KEPT = 8
SPELLINGS_KEPT = 8
"""How many lists of bad words are remembered with their tokens, so that the prompts of a call share one result."""


def core_id(request_id: str, index: int | None = None) -> str:
    """The scheduler's id of a request, or of its completion or beam with this index.

    "#" separates the two. A "#" in the caller's id is doubled, so that no request's id equals that of another one's
    part.
    """
    escaped = request_id.replace("#", "##") if "#" in request_id else request_id
    return escaped if index is None else f"{escaped}#{index}"


@dataclass(frozen=True)
class PreparedRequest:
    """A request that has passed all checks."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    """Stop token ids, including the model's own."""
    options: RequestOptions
    """Options for the scheduler and the cache."""

    @functools.cached_property
    def children(self) -> tuple[Request, ...]:
        """One scheduler request per completion. For a beam search there is a single one, which is not run: it is the
        template for the beams' limits and options."""
        num_children = 1 if self.params.use_beam_search else self.params.num_choices
        return tuple(
            self._child(core_id(self.request_id, None if num_children == 1 else index), self.params.for_choice(index))
            for index in range(num_children)
        )

    def _child(self, child_id: str, params: SamplingParams) -> Request:
        assert params.max_tokens is not None
        return Request(
            child_id,
            self.prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=self.stop_token_ids,
            sampling_params=params,
            reads_cache=params.prompt_logprobs is None and params.pooling != "mean",
            can_draft=not (params.is_guided and (params.ignore_eos or params.min_tokens)),  # its guide may end it
            can_draft_ahead=not params.bad_words and not params.min_tokens,
            is_guided=params.is_guided,
            options=self.options,
        )

    @property
    def view(self) -> PromptView:
        """The view of this request for a predictor of answer lengths."""
        return PromptView(
            self.prompt_token_ids,
            max_tokens=self.params.max_tokens,
            temperature=self.params.temperature,
            text=self.prompt,
            user=self.options.tenant or None,
            request_id=self.request_id,
        )


class RequestPreparer:
    """Checks requests for one model. It keeps no state between requests except caches of grammars and bad words."""

    def __init__(self, *, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._grammar_of = functools.lru_cache(GRAMMARS_KEPT)(grammar_of)
        self._spell = functools.lru_cache(SPELLINGS_KEPT)(self._spell_words)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> PreparedRequest:
        """Check a request completely. Raises `InvalidRequestError` that says what is wrong with it."""
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
        prompt_token_ids = self._token_ids(parts)
        self.check_prompt(prompt_token_ids)
        params = self._resolve(params, room=self.max_model_len - len(prompt_token_ids))
        return PreparedRequest(request_id, parts.text, prompt_token_ids, params, self._stop_token_ids(params), options)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `InvalidRequestError` if it has none."""
        if self.tokenizer is None:
            raise InvalidRequestError("This model has no tokenizer; name one with --tokenizer.", param="tokenizer")
        return self.tokenizer

    def chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_options: Any,
    ) -> list[int]:
        """The prompt that the model's chat template makes from a conversation. `tools` are in OpenAI's format."""
        tokenizer = self.get_tokenizer()
        text = chat_text(tokenizer, messages, tools=tools_from(tools or ()), **template_options)
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes the special tokens itself

    def check_prompt(self, token_ids: Sequence[int], *, param: str = "prompt") -> None:
        """Raise `InvalidRequestError` for token ids that cannot be a prompt of this model. `param` is the field that
        they came from."""
        num_tokens = len(token_ids)
        if num_tokens >= self.max_model_len:
            raise RequestTooLargeError.for_context(
                f"'{param}' has {num_tokens} tokens; with at least one of output, it may have {self.max_model_len - 1}",
                num_tokens=num_tokens,
                max_model_len=self.max_model_len,
                param=param,
            )
        self.check_ids(token_ids, param=param)

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise `InvalidRequestError` unless there is at least one token and all are in the vocabulary."""
        if not token_ids:
            raise InvalidRequestError(f"'{param}' is empty.", param=param)
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidRequestError(
                f"'{param}' has token id {low if low < 0 else high}, which is outside the vocabulary (0 to "
                f"{self.vocab_size - 1}).",
                param=param,
            )

    def check_params(self, params: SamplingParams) -> None:
        """Raise `InvalidRequestError` for parameters that this model does not support, whatever the prompt."""
        params.validate_for_vocabulary(self.vocab_size)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            name = "stop" if params.stop_strings else "bad_words"
            raise InvalidRequestError(f"{name} needs a tokenizer, and this model has none.", param=name)

    def spell(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the token sequences of their bad words."""
        if not params.bad_words or params.bad_word_token_ids is not None:
            return params
        params = params.with_bad_word_token_ids(self._spell(tuple(params.bad_words)))
        params.validate_for_vocabulary(self.vocab_size)  # the tokenizer may know tokens that the model does not
        return params

    def _token_ids(self, prompt: PromptParts) -> tuple[int, ...]:
        if prompt.text is None or prompt.token_ids is not None:
            return as_token_ids(prompt.token_ids)
        if self.tokenizer is None:
            raise InvalidRequestError(
                "This model has no tokenizer, so a prompt must be a list of token ids.", param="prompt"
            )
        return tuple(self.tokenizer.encode(prompt.text))

    def _resolve(self, params: SamplingParams, *, room: int) -> SamplingParams:
        """Resolve the parameters that depend on the model: the room left for output, the tokens of bad words, the
        grammar."""
        self.check_params(params)
        if params.use_beam_search:
            self._check_width(params)
        params = self.spell(params.within(room))
        if params.structured_outputs is not None and params.grammar is None:
            params = params.with_grammar(self._grammar_of(params.structured_outputs))
        return params

    def _spell_words(self, words: tuple[str, ...]) -> list[list[int]]:
        return spell_bad_words(words, self.get_tokenizer())

    def _check_width(self, params: SamplingParams) -> None:
        """Refuse a beam search that is too wide: each beam needs as many logprobs as there are beams and stop
        tokens."""
        num_stops = len(self._stop_token_ids(params))
        if params.num_choices + num_stops > MAX_LOGPROBS:
            raise InvalidRequestError(
                f"Beam search with {params.num_choices} beams and {num_stops} end-of-sequence and stop tokens is too "
                f"wide: together they may be {MAX_LOGPROBS}.",
                param="n" if params.best_of is None else "best_of",
            )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))
