"""Random conversations with an engine: they branch off from each other, come back for another turn, and break off."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headway import LLM, RequestOutput, SamplingParams
from headway.core.request_options import RequestOptions

MAX_MODEL_LEN = 160
MAX_TOKENS = 24
"""Of the tiny model that they are held with: all tokens, and those of an answer."""


def greedy(max_tokens: int, n: int = 1) -> SamplingParams:
    """The likeliest token each time. Several answers are refused at temperature 0, so they are drawn from it alone."""
    return SamplingParams(temperature=0 if n == 1 else 1, top_k=1, max_tokens=max_tokens, n=n)


@dataclass(frozen=True)
class Turn:
    """What one request got. One that was aborted got only the beginning."""

    prompt: tuple[int, ...]
    answers: list[list[int]]
    finished: bool
    num_cached_tokens: int
    num_preemptions: int


class Conversations:
    """Drives an engine step by step; invariants are checked after each."""

    def __init__(self, llm: LLM, rng: random.Random, *, vocab_size: int, max_prompt: int, max_tokens: int) -> None:
        self.llm, self.rng = llm, rng
        self.vocab_size, self.max_prompt, self.max_tokens = vocab_size, max_prompt, max_tokens
        self.turns: list[Turn] = []
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._said: list[tuple[int, ...]] = [self._new_tokens(max_prompt // 2) for _ in range(2)]

    def run(self, num_turns: int) -> list[Turn]:
        num_added = num_steps = 0
        while num_added < num_turns or self._prompts:
            num_steps += 1
            while num_added < num_turns and len(self._prompts) < 6 and self.rng.random() < 0.6:
                self._ask(f"turn {num_added}")
                num_added += 1
            if self._prompts and num_steps % 19 == 0:
                self._break_off(self.rng.choice(list(self._prompts)))
            if self._prompts:
                for output in self.llm.engine.step().outputs:
                    if output.finished:
                        self._take(output, finished=True)
            self.llm.engine.check_invariants()
        self.llm.engine.core.drain()
        assert self.llm.engine.core.scheduler.kv_cache.num_used_blocks == 0
        return self.turns

    def _ask(self, name: str) -> None:
        said = self.rng.choice(self._said)
        old = said[: self.rng.choice([len(said), self.rng.randint(0, len(said))])]
        new = self._new_tokens(self.rng.randint(1, 6))
        prompt = (*old[: self.max_prompt - len(new)], *new) if self.rng.random() < 0.8 else said[: self.max_prompt]
        params = greedy(self.rng.randint(1, self.max_tokens), n=3 if self.rng.random() < 0.15 else 1)
        self._prompts[name] = prompt
        self.llm.engine.add_request(name, list(prompt), params, self._options())

    def _options(self) -> RequestOptions:
        return RequestOptions(cache_salt=self.rng.choice([None, None, None, "x"]))

    def _break_off(self, name: str) -> None:
        output = self.llm.engine.abort(name)
        assert output is not None
        self._take(output, finished=False)

    def _take(self, output: RequestOutput, *, finished: bool) -> None:
        prompt = self._prompts.pop(output.request_id)
        answers = [answer.token_ids for answer in output.outputs]
        assert output.metrics is not None
        turn = Turn(prompt, answers, finished, output.num_cached_tokens, output.metrics.num_preemptions)
        self.turns.append(turn)
        self._said = [*self._said[-6:], (*prompt, *answers[0])]

    def _new_tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(self.vocab_size) for _ in range(count))


class Alone:
    """The reference: every prompt by itself, on an engine that keeps nothing."""

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        assert llm.engine.core.scheduler.kv_cache.prefix_cache is None
        self._llm, self._num_tokens = llm, num_tokens
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self._answers:
            (output,) = self._llm.generate(list(prompt), greedy(self._num_tokens), use_tqdm=False)
            self._answers[prompt] = output.outputs[0].token_ids
        return self._answers[prompt]

    def check(self, turns: list[Turn]) -> None:
        """Every answer is what the prompt alone gives, or the beginning of it."""
        for turn in turns:
            expected = self.answer(turn.prompt)
            for answer in turn.answers:
                assert answer == expected[: len(answer)]
            assert turn.num_cached_tokens < len(turn.prompt)
