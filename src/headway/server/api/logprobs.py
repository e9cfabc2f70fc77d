"""Writes log-probabilities in the forms of the OpenAI API, and those of prompts in vLLM's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.server.api.jobs import Job
from headway.server.api.prompts import PromptMaker
from headway.server.api.response_models import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, TopLogprob
from headway.wire.messages import PositionLogprobs, TokenLogprob

LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """How a request wants log-probabilities to be written."""

    prompts: PromptMaker
    num_top: int = 0
    """How many of the most likely tokens to return."""
    named_ids: frozenset[int] = frozenset()
    """Tokens to return in place of the most likely ones, in addition to the sampled token."""
    as_token_ids: bool = False
    """Whether a token is written as `token_id:123` in place of its text."""

    @classmethod
    def of(cls, job: Job, prompts: PromptMaker) -> LogprobForm:
        """Return the form that the job's request asks for."""
        return cls(
            prompts,
            num_top=job.num_logprobs or 0,
            named_ids=frozenset(job.params.logprob_token_ids or ()),
            as_token_ids=job.tokens_as_ids,
        )

    def name(self, entry: TokenLogprob) -> str:
        """Return the token's text or `token_id:123`."""
        return f"token_id:{entry.token_id}" if self.as_token_ids else _text(entry, self.prompts)

    def shown(self, position: PositionLogprobs) -> list[TokenLogprob]:
        """Return the tokens to show for a position: the most likely ones, best first, which may not include the sampled
        token. If the request named tokens, return the sampled token and those."""
        if not self.named_ids:
            return most_likely(position, self.num_top)
        named = [entry for entry in position[1:] if entry.token_id in self.named_ids]
        return list({entry.token_id: entry for entry in (position[0], *named)}.values())


def chat_logprobs(positions: Sequence[PositionLogprobs], form: LogprobForm) -> ChatLogprobs:
    """Return one entry per token, each with its alternatives."""
    return ChatLogprobs([chat_position(position, form) for position in positions])


def chat_position(position: PositionLogprobs, form: LogprobForm) -> ChatLogprob:
    """Return the entry of one token with its alternatives."""
    chosen, token_bytes = position[0], form.prompts.token_bytes
    top = [
        TopLogprob(form.name(entry), _finite(entry.logprob), token_bytes(entry.token_id))
        for entry in form.shown(position)
    ]
    return ChatLogprob(form.name(chosen), _finite(chosen.logprob), token_bytes(chosen.token_id), top_logprobs=top)


def most_likely(position: PositionLogprobs, number: int) -> list[TokenLogprob]:
    """Return the most likely tokens of a position, best first. The sampled token may not be among them."""
    ranked = sorted(position, key=lambda entry: -entry.logprob)
    seen: dict[int, TokenLogprob] = {}
    for entry in ranked:
        seen.setdefault(entry.token_id, entry)
    return list(seen.values())[:number]


class CompletionLogprobsWriter:
    """Writes OpenAI's older form: parallel lists, with each token's offset in the text."""

    def __init__(self, form: LogprobForm, *, offset: int = 0) -> None:
        self._form = form
        self._offset = offset

    def write(self, positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        """Write the next tokens. A prompt's first position is None, because nothing precedes it."""
        form, lists = self._form, CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = TokenLogprob(token_id, 0.0, None, None) if position is None else position[0]
            lists.tokens.append(form.name(chosen))
            lists.text_offset.append(self._offset)
            lists.token_logprobs.append(None if position is None else _finite(chosen.logprob))
            lists.top_logprobs.append(None if position is None else self._top(position))
            self._offset += len(_text(chosen, form.prompts))
        return lists

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """Return the alternatives of a position. They always include the sampled token, as in OpenAI's API."""
        top = {self._form.name(entry): _finite(entry.logprob) for entry in self._form.shown(position)}
        top.setdefault(self._form.name(position[0]), _finite(position[0].logprob))
        return top


def prompt_position(position: PositionLogprobs | None, prompts: PromptMaker) -> dict[str, PromptLogprob] | None:
    """Return vLLM's form of a prompt token's log-probabilities: a mapping from token ids."""
    if position is None:
        return None
    return {
        str(entry.token_id): PromptLogprob(_finite(entry.logprob), entry.rank, _text(entry, prompts))
        for entry in position
    }


def _text(entry: TokenLogprob, prompts: PromptMaker) -> str:
    return prompts.token_text(entry.token_id) if entry.text is None else entry.text


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
