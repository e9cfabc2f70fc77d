"""What one request asks of sampling and stopping: a frozen record, checked when it is made.

Names, defaults and meanings are those that vLLM's users know. A value that is out of range, not a number, of the wrong
type, or in conflict with another one raises `InvalidRequestError` whose `param` names the field, so nothing downstream
has to check again. Token ids can only be checked once the vocabulary is known: `validate_for_vocabulary`.

A field declares its own check. Flags of the command line, fields of the HTTP API and the message to the engine process
are derived from the fields, so a new parameter is a field here and the place in the sampler that reads it.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from headway.errors import InvalidRequestError

Pooling = Literal["mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
Check = Callable[[str, Any], Any]
"""(field name, value) → the value as it is kept; raises `InvalidRequestError`."""

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy: dividing logits by it would only pick the maximum, less exactly."""

MAX_N = 1024
MAX_LOGPROBS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
"""Their records are made on the host for every token."""
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied or divided by it in float32, which must hold the result."""
MAX_LENGTH_PENALTY = 10.0
MAX_COUNT = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
SHOWN_VALUE_CHARS = 80


def _param(default: Any, check: Check, *, hash: bool | None = None) -> Any:
    """A parameter, and what its values must be."""
    return field(default=default, hash=hash, metadata={"check": check})


# ---- checks of single values ----------------------------------------------------------------------------------------


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits refuses to become text
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN_VALUE_CHARS else text[: SHOWN_VALUE_CHARS - 3] + "..."


def _wrong(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} {rule}, got {_shown(value)}", param=name)


def _real(low: float, high: float, *, low_open: bool = False) -> Check:
    """A number in a range; `low_open`: above `low`."""

    def check(name: str, value: object) -> float:
        number = _as_float(value)
        if low < number <= high or (number == low and not low_open):  # never true of NaN
            return number + 0.0  # no -0
        words = ("above", "and at most") if low_open else ("from", "to")
        raise _wrong(name, value, f"must be a number {words[0]} {low:g} {words[1]} {high:g}")

    return check


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


def _integer(low: int, high: int, *, optional: bool = False) -> Check:
    """A whole number in a range, or None where that is `optional`."""

    def check(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if type(value) is int and low <= value <= high:
            return value
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
            raise _wrong(name, value, f"must be an integer from {low} to {high}{' or None' if optional else ''}")
        return int(value)

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "must be True or False")
    return value


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


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    return _strings(name, [value] if isinstance(value, str) else value)


_token_id = _integer(0, MAX_COUNT)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_token_id(name, item) for item in _items(name, value, "token ids"))


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    token_ids = _token_ids(name, value)
    if not token_ids:
        raise InvalidRequestError(f"{name} must not be empty: no token could be chosen", param=name)
    return token_ids


def _logprob_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Each id once; None if there are none."""
    token_ids = tuple(dict.fromkeys(_token_ids(name, value)))
    if len(token_ids) > MAX_LOGPROB_TOKEN_IDS:
        raise InvalidRequestError(f"{name} may have at most {MAX_LOGPROB_TOKEN_IDS} token ids", param=name)
    return token_ids or None


def _check_token_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name} has token id {token_id}, but the vocabulary has ids 0 to {vocab_size - 1}", param=name
            )


def _early_stopping(name: str, value: Any) -> bool | str:
    """A command line has only text, so "true" stands for True."""
    known: dict[object, bool | str] = {True: True, False: False, "true": True, "false": False, "never": "never"}
    kept = known.get(value.lower() if isinstance(value, str) else value) if isinstance(value, bool | str) else None
    if kept is None:
        raise _wrong(name, value, "must be True, False or 'never'")
    return kept


def _structured_outputs(name: str, value: Any) -> StructuredOutputsParams | None:
    """The record, or a mapping of its fields."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "must be StructuredOutputsParams or a mapping of its fields")
    return StructuredOutputsParams(**value)


_bias = _real(-100.0, 100.0)


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    """A plain dict with integer keys; JSON has only string keys, so "123" stands for 123."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(name, value, "must map token ids to numbers from -100 to 100")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
        bias[_token_id(name, token_id)] = _bias(name, number)
    return bias or None


# ---- the records ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like: exactly one of the first five. Names are vLLM's."""

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as text or as an object. Kept as text."""
    regex: str | None = None
    """A regular expression for the whole answer (Rust's syntax, without look-around and back references)."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar: Lark as llguidance reads it, or GBNF/EBNF (`root ::= ...`)."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """With `json` or `json_object`: no white space between tokens."""
    whitespace_pattern: str | None = None
    """With `json` or `json_object`: a regular expression for the white space that may stand between tokens."""

    def __new__(cls, **fields: Any) -> StructuredOutputsParams:
        """Refuse unknown names."""
        for name in fields:
            if name not in _STRUCTURED_NAMES:
                known = ", ".join(_STRUCTURED_NAMES)
                raise InvalidRequestError(
                    f"unknown field {_shown(name)} of structured_outputs; there are: {known}",
                    param=f"structured_outputs.{name}"[:SHOWN_VALUE_CHARS],
                )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        kinds = [name for name in _STRUCTURED_KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            given = f"; given: {', '.join(kinds)}" if kinds else ""
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(_STRUCTURED_KINDS)}{given}",
                param="structured_outputs",
            )
        kind = kinds[0]
        path = f"structured_outputs.{kind}"
        value = getattr(self, kind)
        if kind == "json":
            object.__setattr__(self, "json", _schema_text(path, value))
        elif kind == "choice":
            choices = _strings(path, value)
            if not choices:
                raise InvalidRequestError(f"{path} must not be empty", param=path)
            object.__setattr__(self, "choice", choices)
        elif kind == "json_object":
            _flag(path, value)
        elif not isinstance(value, str) or not value:
            raise _wrong(path, value, "must be a non-empty string")
        _flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            raise _wrong("structured_outputs.whitespace_pattern", self.whitespace_pattern, "must be a string")
        if kind not in ("json", "json_object"):
            for name in ("disable_any_whitespace", "whitespace_pattern"):
                if getattr(self, name):
                    path = f"structured_outputs.{name}"
                    raise InvalidRequestError(f"{path} goes with json or json_object", param=path)


def _schema_text(path: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping | bool):
        raise _wrong(path, value, "must be a JSON schema: an object, or its text")
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is no JSON: {error}", param=path) from None


_STRUCTURED_NAMES = tuple(item.name for item in dataclasses.fields(StructuredOutputsParams))
_STRUCTURED_KINDS = _STRUCTURED_NAMES[:5]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose, and when to stop choosing, the tokens of one request."""

    n: int = _param(1, _integer(1, MAX_N))
    """How many completions of the prompt to return; independent ones, unless `use_beam_search`."""
    best_of: int | None = _param(None, _integer(1, MAX_N, optional=True))
    """Make this many completions and return the `n` with the highest log-probability per token, the best first. With
    `use_beam_search`: how many beams. None: as many as `n`."""
    temperature: float = _param(1.0, _real(0.0, MAX_TEMPERATURE))
    """Divides the logits: 0 (or below 1e-5) is greedy, 1 the model's own distribution, more, up to 100, is flatter."""
    top_p: float = _param(1.0, _real(0.0, 1.0, low_open=True))
    """Keep the smallest set of most likely tokens whose probabilities reach this sum. 1 keeps all."""
    top_k: int = _param(0, _integer(-1, MAX_COUNT))
    """Keep this many most likely tokens. 0 or -1 keeps all."""
    min_p: float = _param(0.0, _real(0.0, 1.0))
    """Keep tokens at least this times as likely as the most likely one. 0 keeps all."""
    repetition_penalty: float = _param(1.0, _real(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY))
    """Above 1 makes tokens of the prompt and the output less likely, below 1 more likely; from 0.01 to 100."""
    presence_penalty: float = _param(0.0, _real(-2.0, 2.0))
    """Subtracted from the logit of each token that the output already has."""
    frequency_penalty: float = _param(0.0, _real(-2.0, 2.0))
    """Subtracted from a token's logit once for each time the output has it."""
    seed: int | None = _param(None, _integer(MIN_SEED, MAX_SEED, optional=True))
    """Any 64-bit integer makes the request reproducible, alone or in any batch. None: drawn by the engine."""
    max_tokens: int | None = _param(16, _integer(1, MAX_COUNT, optional=True))
    """Stop after this many output tokens. None: when the context is full."""
    min_tokens: int = _param(0, _integer(0, MAX_COUNT))
    """No end-of-sequence or stop token is chosen, and no stop string looked for, before this many output tokens."""
    stop: str | Sequence[str] | None = _param(None, _stop_strings)
    """A string or strings that end the output where they appear. Kept as a tuple: see `stop_strings`."""
    stop_token_ids: Sequence[int] | None = _param(None, _token_ids)
    """Token ids that end the output, besides the model's own end-of-sequence ids. Kept as a tuple."""
    bad_words: Sequence[str] | None = _param(None, _strings)
    """Words that must not appear: the token that would complete one is never chosen. Kept as a tuple."""
    include_stop_str_in_output: bool = _param(False, _flag)
    """Leave the stop string at the end of the text instead of cutting it off."""
    ignore_eos: bool = _param(False, _flag)
    """Go on past the model's end-of-sequence tokens (`stop_token_ids` still stop)."""
    logprobs: int | None = _param(None, _integer(0, MAX_LOGPROBS, optional=True))
    """For each output token return its log-probability and those of this many most likely tokens. None: nothing."""
    prompt_logprobs: int | None = _param(None, _integer(0, MAX_LOGPROBS, optional=True))
    """The same for each prompt token."""
    logprob_token_ids: Sequence[int] | None = _param(None, _logprob_token_ids)
    """For each output token return its log-probability and those of these tokens, at most 128, in place of the most
    likely ones. Kept as a tuple; brings `logprobs=0` with it."""
    logit_bias: Mapping[int, float] | None = _param(None, _logit_bias, hash=False)
    """Added to the logits of these token ids, each from -100 (practically never) to 100 (practically always)."""
    allowed_token_ids: Sequence[int] | None = _param(None, _allowed_token_ids)
    """Only these tokens are chosen. Kept as a tuple; None: all."""
    structured_outputs: StructuredOutputsParams | None = _param(None, _structured_outputs)  # noqa: RUF009
    """What the answer must look like: a JSON schema, a regular expression, one of several texts, or a grammar."""
    skip_special_tokens: bool = _param(True, _flag)
    """Leave special tokens such as end-of-sequence markers out of the text."""
    detokenize: bool = _param(True, _flag)
    """Make text from the output tokens. False returns token ids only, which rules out stop strings."""
    use_beam_search: bool = _param(False, _flag)
    """Look for the most likely sequences instead of sampling tokens: `best_of` beams go on at a time, and the `n` best
    sequences are returned, the best first."""
    length_penalty: float = _param(1.0, _real(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY))
    """Beam search ranks by the sum of logprobs / length**length_penalty: above 0 favours long sequences, below short
    ones."""
    early_stopping: bool | str = _param(False, _early_stopping)
    """When beam search ends. False: when the best beam, were it to end now, is not better than the worst of `best_of`
    ended ones. True: as soon as that many have ended. "never": when no beam can become better at any length."""

    bad_word_token_ids: tuple[tuple[int, ...], ...] | None = field(default=None, init=False, repr=False)
    """The token sequences of `bad_words`, set by `with_bad_word_token_ids` where a tokenizer is at hand."""

    grammar: str | None = field(default=None, init=False, repr=False)
    """`structured_outputs` as a grammar for the matcher, set by `with_grammar` once it has been checked."""

    grammar_bytes: int | None = field(default=None, init=False, repr=False)
    """The memory that compiling the grammar took where it was tried. None: it has not been tried."""

    pooling: Pooling | None = field(default=None, init=False, repr=False)
    """Return a vector that stands for the prompt: see `for_embedding`."""

    def __new__(cls, **fields: Any) -> SamplingParams:
        """Refuse unknown names with the nearest valid one (the generated `__init__` would raise a bare TypeError)."""
        for name in fields:
            if name not in _FIELD_NAMES:
                raise _unknown_name(name)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, default, kept, check in _CHECKS:
            value = getattr(self, name)
            if value is default:
                if kept is not default:
                    object.__setattr__(self, name, kept)
            elif not (
                value and type(value) is type(default) and value == default
            ):  # as from a message; 0.0 may be -0.0
                object.__setattr__(self, name, check(name, value))
        self._check_conflicts()
        self._check_search()
        if self.logprob_token_ids is not None and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)

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
        """Refuse parameters that change the distribution or sample: beams are compared by the model's logprobs."""
        if not self.use_beam_search:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise InvalidRequestError(f"{name} is for beam search: set use_beam_search too", param=name)
            return
        for name, _, kept, _ in _CHECKS:
            if name in _GOES_WITH_BEAM_SEARCH:
                continue
            neutral = _ALSO_NEUTRAL_IN_BEAM_SEARCH.get(name, (kept,))
            if getattr(self, name) not in neutral and not (name == "temperature" and self.greedy):
                shown = " or ".join(_shown(value) for value in neutral if value != ())
                raise InvalidRequestError(
                    f"{name} does not go with use_beam_search, which ranks whole sequences by the model's own "
                    f"log-probabilities: {f'leave it at {shown}' if shown else 'leave it out'}",
                    param=name,
                )

    @classmethod
    def for_embedding(cls, pooling: str = "mean") -> SamplingParams:
        """Make parameters for an embedding, the mean or last hidden state. One token is sampled and dropped."""
        if pooling not in POOLINGS:
            raise _wrong("pooling", pooling, f"must be {' or '.join(map(repr, POOLINGS))}")
        params = cls(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        object.__setattr__(params, "pooling", pooling)
        return params

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
        for name in _TOKEN_ID_FIELDS:
            _check_token_ids(name, getattr(self, name) or (), vocab_size)
        for word in self.bad_word_token_ids or ():
            _check_token_ids("bad_words", word, vocab_size)
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

    def with_grammar(self, grammar: str, num_bytes: int | None = None) -> SamplingParams:
        """A copy with the grammar of its `structured_outputs`, and the bytes that compiling it took, if known."""
        resolved = copy.copy(self)
        object.__setattr__(resolved, "grammar_bytes", num_bytes)
        object.__setattr__(resolved, "grammar", grammar)
        return resolved

    @property
    def is_guided(self) -> bool:
        """Whether a grammar or a list of allowed tokens limits the choice of tokens."""
        return self.structured_outputs is not None or self.allowed_token_ids is not None

    def within(self, num_tokens: int) -> SamplingParams:
        """A copy limited to `num_tokens` tokens of output; `self` if nothing changes."""
        max_tokens = num_tokens if self.max_tokens is None else min(self.max_tokens, num_tokens)
        if self.max_tokens == max_tokens and self.min_tokens <= max_tokens:
            return self
        cut = copy.copy(self)
        object.__setattr__(cut, "max_tokens", max_tokens)
        object.__setattr__(cut, "min_tokens", min(self.min_tokens, max_tokens))
        return cut

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of the `index`-th completion alone, with a separate seed if seeded, and with logprobs if these
        are needed to compare it with others."""
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
        """How many completions are sampled, or beams kept. `n` of them are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses_best(self) -> bool:
        """Whether more completions are sampled than are returned."""
        return self.num_choices > self.n and not self.use_beam_search

    @property
    def can_stream(self) -> bool:
        """Whether tokens can be delivered before the end: later tokens must not affect which ones are returned."""
        return not self.use_beam_search and not self.chooses_best

    def check_can_stream(self) -> None:
        """Raise `InvalidRequestError` if it is known only at the end which tokens are returned."""
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


_CHECKS: tuple[tuple[str, Any, Any, Check], ...] = tuple(
    (item.name, item.default, item.metadata["check"](item.name, item.default), item.metadata["check"])
    for item in dataclasses.fields(SamplingParams)
    if item.init
)
"""(field, default, the default as it is kept, check)"""
_FIELD_NAMES = tuple(name for name, *_ in _CHECKS)
_TOKEN_ID_CHECKS = (_token_ids, _allowed_token_ids, _logprob_token_ids, _logit_bias)
_TOKEN_ID_FIELDS = tuple(name for name, _, _, check in _CHECKS if check in _TOKEN_ID_CHECKS)
"""What holds ids of the vocabulary."""
_GOES_WITH_BEAM_SEARCH = frozenset(
    {
        *("n", "best_of", "seed", "max_tokens", "min_tokens", "stop_token_ids", "include_stop_str_in_output"),
        *("ignore_eos", "skip_special_tokens", "detokenize"),
        *("use_beam_search", "length_penalty", "early_stopping"),
    }
)
"""Every other parameter changes what is sampled, so it must have the value that changes nothing: its default, or one of
these."""
_ALSO_NEUTRAL_IN_BEAM_SEARCH: dict[str, tuple[Any, ...]] = {"temperature": (0.0, 1.0), "top_k": (0, -1)}


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
        object.__setattr__(self, "beam_width", _integer(1, MAX_N)("beam_width", self.beam_width))
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
