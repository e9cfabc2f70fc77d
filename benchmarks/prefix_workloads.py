"""Workloads with shared prefixes: which prompt comes when, and what the model answers.

A turn is one request. Its answer is part of the data, so that the prompt of the next turn goes on from it, as it does
in a chat. Turns come in an order that a server would see: conversations begin at random moments (Poisson), the next
turn comes when the answer is there and somebody has read it and typed (lognormal think time).

    conversations   each turn after the one before
    paths           a tree's branches, from root to leaf, each a conversation of somebody else
    trace           prompts given as ids of blocks, at the times of the trace; each id becomes one block of tokens
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config import ModelConfig
from headway.loader.chosen_model import load_model_tokenizer
from headway.tokenizer import Tokenizer

STEP_S = 0.02  # virtual time of a step
THINK_MEDIAN_S, THINK_SIGMA = 15.0, 1.0
FIRST_OWN_TOKEN = 1 << 24  # above every token and block id: what a request of the trace does not share


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request and what comes of it."""

    arrival_s: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    after: Turn | None
    """Its arrival waits for this one's end, should that be later than planned."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


Conversation = Sequence[Message]
"""User and assistant in turns."""
Exchange = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt, with all that came before, and its answer."""


def conversations(path: Path) -> list[Conversation]:
    """Linear conversations: rows with a `history` of {user, bot}."""
    return [
        [m for turn in row["history"] for m in (Message("user", turn["user"]), Message("assistant", turn["bot"]))]
        for row in _rows(path)
    ]


def tree_paths(path: Path) -> list[Conversation]:
    """Every way from the root of a conversation tree to a leaf."""
    return [branch for row in _rows(path) for branch in _branches(row["prompt"], ())]


def _branches(node: dict[str, Any], above: tuple[Message, ...]) -> Iterator[Conversation]:
    here = (*above, Message("user" if node["role"] == "prompter" else "assistant", node["text"]))
    if not node["replies"]:
        yield here
    for reply in node["replies"]:
        yield from _branches(reply, here)


def chat_turns(texts: Sequence[Conversation], *, render: str, num_at_once: int, once: bool = False) -> list[Turn]:
    """All turns by arrival. Conversations begin in random order, as often as keeps `num_at_once` of them going.

    `once`: a turn that an earlier conversation had, word for word, does not come again; what follows goes on from it.
    """
    rng = random.Random(0)
    tokens = Rendering(render)
    plans = [list(tokens.turns(text)) for text in rng.sample(texts, len(texts))]
    pauses = [[_pause_s(answer, rng) for _, answer in plan] for plan in plans]
    starts_per_s = num_at_once * len(plans) / sum(map(sum, pauses))
    turns: list[Turn] = []
    known: dict[Exchange, Turn] = {}
    start_s = 0.0
    for plan, pause in zip(plans, pauses):
        start_s += rng.expovariate(starts_per_s)
        at_s, before = start_s, None
        for exchange, pause_s in zip(plan, pause):
            turn = known.get(exchange) if once else None
            if turn is None:
                turn = known[exchange] = Turn(at_s, *exchange, before)
                turns.append(turn)
            at_s, before = turn.arrival_s + pause_s, turn
    return sorted(turns, key=lambda turn: turn.arrival_s)


def _pause_s(answer: Sequence[int], rng: random.Random) -> float:
    """From one turn to the next: twice the time of the answer in steps, and what its reader needs."""
    return 2 * len(answer) * STEP_S + THINK_MEDIAN_S * rng.lognormvariate(0.0, THINK_SIGMA)


class Rendering:
    """Messages to tokens: by the model's chat template ("template"), or text after text ("plain")."""

    def __init__(self, kind: str) -> None:
        tokenizer = load_model_tokenizer(ModelConfig())
        assert tokenizer is not None
        self._tokenizer: Tokenizer = tokenizer
        self._turns = {"template": self._by_template, "plain": self._plainly}[kind]

    def turns(self, text: Conversation) -> Iterator[Exchange]:
        """Every prompt that has an answer."""
        for place in range(1, len(text), 2):
            yield self._turns(text[:place], text[place].text)

    def _by_template(self, history: Conversation, answer: str) -> Exchange:
        prompt_text = self._tokenizer.apply_chat_template([{"role": m.role, "content": m.text} for m in history])
        end = "<|im_end|>"
        prompt, both = self._encode(prompt_text), self._encode(prompt_text + answer + end)
        # An answer that begins with white space may melt into the prompt's last token: then it is taken by itself.
        is_continued = both[: len(prompt)] == prompt
        return prompt, both[len(prompt) :] if is_continued else self._encode(answer + end)

    def _plainly(self, history: Conversation, answer: str) -> Exchange:
        return tuple(itertools.chain.from_iterable(self._encode(m.text) for m in history)), self._encode(answer)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    arrival_s: float
    block_ids: tuple[int, ...]
    num_output_tokens: int
    """Scaled like the prompt: a block of the trace, 512 tokens, is one of ours."""


def trace(path: Path, block_size: int) -> list[TracedRequest]:
    """Requests of a block trace in order of arrival."""
    return [
        TracedRequest(
            row["timestamp"] / 1e3, tuple(row["hash_ids"]), max(1, round(row["output_length"] * block_size / 512))
        )
        for row in _rows(path)
    ]


def trace_turns(requests: Sequence[TracedRequest], block_size: int) -> list[Turn]:
    """Each block id as a block of tokens. One token more ends the prompt, since the last one must be computed always
    and would take its block from the comparison; it and the answer are the request's own."""
    turns = []
    for own, request in enumerate(requests, FIRST_OWN_TOKEN):
        shared = tuple(itertools.chain.from_iterable((block_id,) * block_size for block_id in request.block_ids))
        turns.append(Turn(request.arrival_s, (*shared, own), (own,) * request.num_output_tokens, None))
    return turns


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)
