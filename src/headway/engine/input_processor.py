"""From what a user sends to what the scheduler queues: everything is checked here, before anything is queued."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from headway.core import Request
from headway.engine.request_options import RequestOptions, check_options
from headway.errors import InvalidRequestError, RequestTooLargeError
from headway.sampling_params import MAX_LOGPROBS, SamplingParams
from headway.tokenizer import Tokenizer, spell_bad_words

Prompt = str | Sequence[int]

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


class InputProcessor:
    """Tokenises and validates. Knows nothing of the requests before, but for how their bad words are spelt."""

    def __init__(self, *, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._spell = functools.lru_cache(SPELLINGS_KEPT)(self._spell_bad_words)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> PreparedRequest:
        """Check everything about a request; `InvalidRequestError` says what is wrong with it."""
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(f"request_id must be a non-empty string, not {request_id!r}.", param="request_id")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}.", param="sampling_params"
            )
        check_options(options)
        prompt_token_ids = self._tokenize(prompt)
        params = self._resolve(params, num_prompt_tokens=len(prompt_token_ids))
        num_children = 1 if params.use_beam_search else params.num_choices
        return PreparedRequest(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=prompt_token_ids,
            params=params,
            children=tuple(
                self._child(
                    request_id if num_children == 1 else f"{request_id}#{index}",
                    prompt_token_ids,
                    params.for_choice(index),
                    **options,
                )
                for index in range(num_children)
            ),
        )

    def _tokenize(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError(
                    "This model has no tokenizer, so a prompt must be a list of token ids.", param="prompt"
                )
            token_ids = tuple(self.tokenizer.encode(prompt))
        else:
            token_ids = _as_token_ids(prompt)
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
        self, request_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams, **more: Any
    ) -> Request:
        assert params.max_tokens is not None
        return Request(
            request_id,
            prompt_token_ids,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=self._stop_token_ids(params),
            sampling_params=params,
            reads_cache=params.prompt_logprobs is None,
            **more,
        )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if self.tokenizer is None or params.ignore_eos else self.tokenizer.eos_token_ids
        return frozenset((*eos, *(params.stop_token_ids or ())))


def _as_token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Accept any sequence of whole numbers (list, tuple, array); nothing that merely looks like one."""
    if isinstance(prompt, bytes | bytearray) or not hasattr(prompt, "__iter__"):
        raise InvalidRequestError(
            f"A prompt is a string or a list of token ids, not {type(prompt).__name__}.", param="prompt"
        )
    if isinstance(prompt, list | tuple) and set(map(type, prompt)) == {int}:
        return tuple(prompt)
    token_ids = []
    for token_id in prompt:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidRequestError(f"A prompt's token ids must be whole numbers, not {token_id!r}.", param="prompt")
        token_ids.append(token_id.__index__())
    return tuple(token_ids)
