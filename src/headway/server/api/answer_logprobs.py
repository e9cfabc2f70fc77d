"""Log-probabilities in the three forms that clients know: chat, plain completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence

from headway.rpc.messages import PositionLogprobs, TokenLogprob
from headway.server.api.answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprob, TopLogprob
from headway.server.api.prompts import PromptMaker

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot write."""


def chat_logprobs(positions: Sequence[PositionLogprobs], num_top: int, prompts: PromptMaker) -> ChatLogprobs:
    """One entry per token, each with the `num_top` most likely ones."""
    return ChatLogprobs([_chat_position(position, num_top, prompts) for position in positions])


def _chat_position(position: PositionLogprobs, num_top: int, prompts: PromptMaker) -> ChatLogprob:
    chosen = position[0]
    top = [
        TopLogprob(_text(entry, prompts), _finite(entry.logprob), prompts.token_bytes(entry.token_id))
        for entry in most_likely(position, num_top)
    ]
    return ChatLogprob(
        _text(chosen, prompts), _finite(chosen.logprob), prompts.token_bytes(chosen.token_id), top_logprobs=top
    )


def most_likely(position: PositionLogprobs, number: int) -> list[TokenLogprob]:
    """The best tokens of a position, in order; the chosen one, which stands first there, is not always among them."""
    ranked = sorted(position, key=lambda entry: -entry.logprob)
    seen: dict[int, TokenLogprob] = {}
    for entry in ranked:
        seen.setdefault(entry.token_id, entry)
    return list(seen.values())[:number]


class CompletionLogprobsWriter:
    """Collects OpenAI's older form: lists side by side, with each token's place in the text."""

    def __init__(self, num_top: int, prompts: PromptMaker, *, offset: int = 0) -> None:
        self._num_top = num_top
        self._prompts = prompts
        self._offset = offset

    def write(self, positions: Sequence[PositionLogprobs | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        """The next tokens. A position without log-probabilities is the first of a prompt: nothing precedes it."""
        lists = CompletionLogprobs([], [], [], [])
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._prompts.token_text(token_id) if position is None else _text(position[0], self._prompts)
            lists.tokens.append(text)
            lists.text_offset.append(self._offset)
            lists.token_logprobs.append(None if position is None else _finite(position[0].logprob))
            lists.top_logprobs.append(None if position is None else self._top(position))
            self._offset += len(text)
        return lists

    def _top(self, position: PositionLogprobs) -> dict[str, float]:
        """The chosen token is always among them, as OpenAI has it."""
        top = {_text(entry, self._prompts): _finite(entry.logprob) for entry in most_likely(position, self._num_top)}
        top.setdefault(_text(position[0], self._prompts), _finite(position[0].logprob))
        return top


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], prompts: PromptMaker
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's form: per prompt token, a mapping from token ids."""
    return [
        None
        if position is None
        else {
            str(entry.token_id): PromptLogprob(_finite(entry.logprob), entry.rank, _text(entry, prompts))
            for entry in position
        }
        for position in positions
    ]


def _text(entry: TokenLogprob, prompts: PromptMaker) -> str:
    return prompts.token_text(entry.token_id) if entry.text is None else entry.text


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB
