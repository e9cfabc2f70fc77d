"""What one request asks of sampling and stopping: a frozen record, checked when it is made.

Names, defaults and meanings are those that vLLM's users know. A value that is out of range, not a number, of the wrong
type, or in conflict with another one raises `InvalidRequestError` whose `param` names the field, so nothing downstream
has to check again. Token ids can only be checked once the vocabulary is known: `validate_for_vocabulary`.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from headway.errors import InvalidRequestError

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy: dividing logits by it would only pick the maximum, less exactly."""

MAX_N = 1024
MAX_LOGPROBS = 1024
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied or divided by it in float32, which must hold the result."""
MAX_LENGTH_PENALTY = 10.0
MAX_COUNT = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
SHOWN_VALUE_CHARS = 80


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose, and when to stop choosing, the tokens of one request."""

    n: int = 1
    """How many completions of the prompt to return; independent ones, unless `use_beam_search`."""
    best_of: int | None = None
    """Make this many completions and return the `n` with the highest log-probability per token, the best first. With
    `use_beam_search`: how many beams. None: as many as `n`."""
    temperature: float = 1.0
    """Divides the logits: 0 (or below 1e-5) is greedy, 1 the model's own distribution, more, up to 100, is flatter."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum. 1 keeps all."""
    top_k: int = 0
    """Keep this many most likely tokens. 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this times as likely as the most likely one. 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the output less likely, below 1 more likely; from 0.01 to 100."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output already has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time the output has it."""
    seed: int | None = None
    """Any 64-bit integer makes the request reproducible, alone or in any batch. None: drawn by the engine."""
    max_tokens: int | None = 16
    """Stop after this many output tokens. None: when the context is full."""
    min_tokens: int = 0
    """No end-of-sequence or stop token is chosen, and no stop string looked for, before this many output tokens."""
    stop: str | Sequence[str] | None = None
    """A string or strings that end the output where they appear. Kept as a tuple: see `stop_strings`."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output, besides the model's own end-of-sequence ids. Kept as a tuple."""
    bad_words: Sequence[str] | None = None
    """Words that must not appear: the token that would complete one is never chosen. Kept as a tuple."""
    include_stop_str_in_output: bool = False
    """Leave the stop string at the end of the text instead of cutting it off."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens (`stop_token_ids` still stop)."""
    logprobs: int | None = None
    """For each output token return its log-probability and those of this many most likely tokens. None: nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids, each from -100 (practically never) to 100 (practically always)."""
    skip_special_tokens: bool = True
    """Leave special tokens such as end-of-sequence markers out of the text."""
    detokenize: bool = True
    """Make text from the output tokens. False returns token ids only, which rules out stop strings."""
    use_beam_search: bool = False
    """Look for the most likely sequences instead of sampling tokens: `best_of` beams go on at a time, and the `n` best
    sequences are returned, the best first."""
    length_penalty: float = 1.0
    """Beam search ranks by the sum of logprobs / length**length_penalty: above 0 favours long sequences, below short
    ones."""
    early_stopping: bool | str = False
    """When beam search ends. False: when the best beam, were it to end now, is not better than the worst of `best_of`
    ended ones. True: as soon as that many have ended. "never": when no beam can become better at any length."""

    bad_word_token_ids: tuple[tuple[int, ...], ...] | None = field(default=None, init=False, repr=False)
    """The token sequences of `bad_words`, set by `with_bad_word_token_ids` where a tokenizer is at hand."""

    def __new__(cls, **fields: Any) -> SamplingParams:
        """Refuse unknown names with the nearest valid one (the generated `__init__` would raise a bare TypeError)."""
        for name in fields:
            if name not in _FIELD_NAMES:
                raise _unknown_name(name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        for name, (low, high, low_open) in _REAL_RANGES.items():
            set_field(self, name, _real(name, getattr(self, name), low=low, high=high, low_open=low_open))
        for name, (least, most, optional) in _INTEGER_RANGES.items():
            set_field(self, name, _integer(name, getattr(self, name), low=least, high=most, optional=optional))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "must be True or False")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        set_field(self, "stop", _strings("stop", stop))
        set_field(self, "bad_words", _strings("bad_words", self.bad_words))
        set_field(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        set_field(self, "logit_bias", _logit_bias(self.logit_bias))
        set_field(self, "early_stopping", _early_stopping(self.early_stopping))
        self._check_conflicts()
        self._check_search()

    def _check_conflicts(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need text to be searched: leave detokenize on, or use stop_token_ids", param="stop"
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of ({self.best_of}) must not be less than n ({self.n})", param="best_of")
        if self.greedy and self.num_choices > 1 and not self.use_beam_search:
            name = "n" if self.n > 1 else "best_of"
            raise InvalidRequestError(
                f"{name} must be 1 when sampling is greedy (temperature {self.temperature:g}): all {self.num_choices} "
                "completions would be the same; raise the temperature or ask for one",
                param=name,
            )

    def _check_search(self) -> None:
        """Beams are compared by the model's own logprobs, so nothing that changes or draws from them goes with it."""
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequestError(f"{name} is for beam search: set use_beam_search too", param=name)
            return
        for name, neutral in _NEUTRAL_IN_BEAM_SEARCH.items():
            if getattr(self, name) not in neutral and not (name == "temperature" and self.greedy):
                shown = " or ".join(_shown(value) for value in neutral if value != ())
                raise InvalidRequestError(
                    f"{name} does not go with use_beam_search, which ranks whole sequences by the model's own "
                    f"log-probabilities: {f'leave it at {shown}' if shown else 'leave it out'}",
                    param=name,
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping of field names, e.g. parsed JSON. Unknown names raise, naming the nearest valid one."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(
                f"sampling parameters must be a mapping of names to values, got {type(values).__name__}"
            )
        for name in values:
            if name not in _FIELD_NAMES:
                raise _unknown_name(name)
        return cls(**values)

    def validate_for_vocabulary(self, vocab_size: int) -> None:
        """Raise if a token id does not exist in, or a number of logprobs exceeds, a vocabulary of this size."""
        id_fields: tuple[tuple[str, Iterable[int]], ...] = (
            ("stop_token_ids", self.extra_stop_token_ids),
            ("logit_bias", self.logit_bias or ()),
            ("bad_words", (token for word in self.bad_word_token_ids or () for token in word)),
        )
        for name, ids in id_fields:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} has token id {token_id}, but the vocabulary has ids 0 to {vocab_size - 1}", param=name
                    )
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(self, name)
            if number is not None and number > vocab_size:
                raise InvalidRequestError(f"{name} is {number}, but the vocabulary has {vocab_size} tokens", param=name)

    def with_bad_word_token_ids(self, token_ids: Iterable[Iterable[int]]) -> SamplingParams:
        """A copy that carries the token sequences of its `bad_words`."""
        resolved = copy.copy(self)
        sequences = tuple(tuple(int(token) for token in word) for word in token_ids)
        object.__setattr__(resolved, "bad_word_token_ids", tuple(word for word in sequences if word))
        return resolved

    def within(self, num_tokens: int) -> SamplingParams:
        """The same with room for so many tokens at most; `self` if nothing changes."""
        max_tokens = num_tokens if self.max_tokens is None else min(self.max_tokens, num_tokens)
        if self.max_tokens == max_tokens and self.min_tokens <= max_tokens:
            return self
        cut = copy.copy(self)
        object.__setattr__(cut, "max_tokens", max_tokens)
        object.__setattr__(cut, "min_tokens", min(self.min_tokens, max_tokens))
        return cut

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of the `index`-th completion that is made: one, with a seed of its own if seeded, and with
        logprobs if it is to be compared with others."""
        if self.num_choices == 1 and index == 0:
            return self
        choice = copy.copy(self)
        object.__setattr__(choice, "n", 1)
        object.__setattr__(choice, "best_of", None)
        if self.chooses_best and self.logprobs is None:
            object.__setattr__(choice, "logprobs", 0)
        if self.seed is not None:
            object.__setattr__(choice, "seed", (self.seed + index) % 2**64)
        return choice

    @property
    def num_choices(self) -> int:
        """How many completions are made, or beams kept; `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses_best(self) -> bool:
        """Whether more completions are sampled than are returned."""
        return self.num_choices > self.n and not self.use_beam_search

    @property
    def can_stream(self) -> bool:
        """Whether tokens can be told before the end: which ones are returned must not depend on those that follow."""
        return not self.use_beam_search and not self.chooses_best

    def check_can_stream(self) -> None:
        """Raise if only the end tells which tokens are returned."""
        if not self.can_stream:
            name = "use_beam_search" if self.use_beam_search else "best_of"
            reason = "which tokens are returned is known only at the end"
            raise InvalidRequestError(f"{name} does not go with streaming: {reason}.", param=name)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_penalised(self) -> bool:
        """Whether tokens seen before change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def extra_stop_token_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always as a tuple."""
        return cast("tuple[int, ...]", self.stop_token_ids)


_FIELD_NAMES = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.init)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "use_beam_search")
# name: (lowest, highest, whether the lowest itself is excluded)
_REAL_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, MAX_TEMPERATURE, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, False),
}
# name: (lowest, highest, whether None is allowed)
_INTEGER_RANGES: dict[str, tuple[int, int, bool]] = {
    "n": (1, MAX_N, False),
    "best_of": (1, MAX_N, True),
    "top_k": (-1, MAX_COUNT, False),
    "seed": (MIN_SEED, MAX_SEED, True),
    "max_tokens": (1, MAX_COUNT, True),
    "min_tokens": (0, MAX_COUNT, False),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
}
# name: the values that change nothing
_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "stop": ((),),
    "bad_words": ((),),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None,),
}


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` is asked for: vLLM's names, and those of `SamplingParams` with `use_beam_search`."""

    beam_width: int
    """How many beams go on at a time, and how many sequences are returned."""
    max_tokens: int | None = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, low=1, high=MAX_N))
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        """The same as a request to the engine."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


def _unknown_name(name: object) -> InvalidRequestError:
    text = str(name)
    near = difflib.get_close_matches(text.lower(), _FIELD_NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"valid names are: {', '.join(_FIELD_NAMES)}"
    return InvalidRequestError(f"unknown sampling parameter {_shown(text)}; {hint}", param=text)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits refuses to become text
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN_VALUE_CHARS else text[: SHOWN_VALUE_CHARS - 3] + "..."


def _wrong(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {rule}, got {_shown(value)}", param=name)


def _real(name: str, value: object, *, low: float, high: float, low_open: bool = False) -> float:
    number = _as_float(value)
    if low < number <= high or (number == low and not low_open):  # never true of NaN
        return number + 0.0  # no -0
    rule = f"must be a number {'above' if low_open else 'from'} {low:g} {'and at most' if low_open else 'to'} {high:g}"
    raise _wrong(name, value, rule)


def _as_float(value: object) -> float:
    """NaN for what is no number, or none that a float can hold."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _integer(name: str, value: object, *, low: int, high: int, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise _wrong(name, value, f"must be an integer from {low} to {high}{' or None' if optional else ''}")
    return int(value)


def _items(name: str, value: Any, kind: str) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _wrong(name, value, f"must be a list of {kind}")
    return list(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = _items(name, value, "non-empty strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise _wrong(name, item, "must hold only non-empty strings")
    return tuple(items)


def _token_ids(value: Any) -> tuple[int, ...]:
    items = _items("stop_token_ids", value, "token ids")
    return tuple(cast(int, _integer("stop_token_ids", item, low=0, high=MAX_COUNT)) for item in items)


def _early_stopping(value: Any) -> bool | str:
    """A command line has only text, so "true" stands for True."""
    known: dict[object, bool | str] = {True: True, False: False, "true": True, "false": False, "never": "never"}
    kept = known.get(value.lower() if isinstance(value, str) else value) if isinstance(value, bool | str) else None
    if kept is None:
        raise _wrong("early_stopping", value, "must be True, False or 'never'")
    return kept


def _logit_bias(value: Any) -> dict[int, float] | None:
    """A plain dict with integer keys; JSON has only string keys, so "123" stands for 123."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", value, "must map token ids to numbers from -100 to 100")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
        checked = cast(int, _integer("logit_bias", token_id, low=0, high=MAX_COUNT))
        bias[checked] = _real("logit_bias", number, low=-100.0, high=100.0)
    return bias or None
