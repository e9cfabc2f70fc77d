"""The forms in which programs may give prompts and options to `LLM` and `AsyncLLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headway.core.request_options import DEFAULT_OPTIONS, OPTION_NAMES, RequestOptions
from headway.errors import InvalidRequestError, did_you_mean
from headway.tokenizer.tokenizer import IDS_PER_CHAR

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (a list, or an array or tensor with one dimension), or a dict with either (see `PromptParts`)."""


@dataclass(frozen=True)
class PromptParts:
    """A prompt in the forms that vLLM's users know: `{"prompt": text}` or `{"prompt_token_ids": ids}`.

    If both are given, the ids are used and outputs show the text as the prompt. `{"cache_salt": ...}` may be added in
    place of the option. None means that a part was not given.
    """

    text: str | None
    token_ids: Sequence[int] | None
    cache_salt: str | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> PromptParts:
        """Read a prompt in any form. Raises `InvalidRequestError` if it is no prompt, or has images or embeddings."""
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
    """Return a list of prompts, given one prompt (a string, a dict or token ids) or many."""
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
    """The options of each request. They may be given once or one per request, as records or by name."""
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


def take_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the request options from the keywords and return them."""
    return {name: keywords.pop(name) for name in OPTION_NAMES if name in keywords}


def one_each(value: Any, count: int, name: str, kind: type) -> list[Any]:
    """Return a list with one value per prompt, given one for all or a sequence. A dict counts as one value, not as a
    list of its keys; the check of values refuses it later."""
    if isinstance(value, (kind, Mapping)) or not hasattr(value, "__iter__"):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise InvalidRequestError(f"{len(values)} {name} for {count} prompts; give one, or one each.", param=name)
    return values


def num_chars_of(prompt: Prompt) -> int:
    """The work of preparing a prompt, measured in characters to tokenise."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    if isinstance(prompt, str):
        return len(prompt)
    return len(prompt) // IDS_PER_CHAR if hasattr(prompt, "__len__") else 0


def as_token_ids(prompt: Any) -> tuple[int, ...]:
    """Return token ids from any sequence of whole numbers (list, tuple, array, tensor). Raises `InvalidRequestError`
    for anything else."""
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
    """Whether this is a numpy array or torch tensor of numbers, or a similar object, with at least one dimension."""
    if not hasattr(value, "tolist") or not hasattr(value, "dtype") or getattr(value, "ndim", 0) == 0:
        return False
    return getattr(value.dtype, "kind", "") not in ("O", "S", "U")  # an array of strings is a list of them


def _is_scalar(value: object) -> bool:
    """Whether this is an element of an array. Such an object may claim to be iterable and to have an index, whatever it
    holds."""
    return hasattr(value, "tolist") and getattr(value, "ndim", None) == 0
