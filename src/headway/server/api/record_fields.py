"""Derives fields of HTTP bodies from the records `SamplingParams` and `RequestOptions`.

Each field of these records is a field of the API with the same name and type, and may be null or left out. A new field
therefore needs no line here, unless it is one of the exceptions in the tables below. The records check their own
values; limits that only the server has are in `request_bounds` and `service_classes`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

from headway.core.request_options import DEFAULT_OPTIONS, RequestOptions
from headway.sampling_params import SamplingParams
from headway.server.api.api_errors import bad_request
from headway.structured.tool_schemas import MAX_NESTING, is_too_deep


class HttpOption(NamedTuple):
    """How the API spells an option of `RequestOptions`."""

    name: str
    """The option's name in `RequestOptions`."""
    http_name: str
    per_unit: float = 1.0
    """How many units of the API make one unit of the option."""


# ---- exceptions -----------------------------------------------------------------------------------------------------

NOT_SAMPLING_FIELDS = frozenset({"detokenize", "logprobs", "structured_outputs"})
"""Answers are always text. `logprobs` has different types in OpenAI's two endpoints, so each declares it. An output
constraint has several fields, in the record `response_format.StructuredOutputs`."""
SAMPLING_TYPES: Mapping[str, Any] = {"early_stopping": bool | Literal["never"]}
NOT_OF_ONE_ANSWER = frozenset(
    {
        *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping"),
        *("max_tokens", "prompt_logprobs"),
    }
)
"""Sampling fields that `/v1/responses` does not have: it returns one answer, has another name for its length, and
returns no log-probabilities of the prompt."""
NOT_OPTION_FIELDS = frozenset({"predicted_tokens", "blocks_at"})
"""Options that the server sets itself: it predicts lengths, and its router knows where blocks are."""
OPTION_NAMES: Mapping[str, HttpOption] = {
    "tenant": HttpOption("tenant", "user"),
    "ttft_target_s": HttpOption("ttft_target_s", "ttft_target_ms", 1e3),
    "tpot_target_s": HttpOption("tpot_target_s", "tpot_target_ms", 1e3),
}


# ---- the fields -----------------------------------------------------------------------------------------------------


def _json_type(kind: Any) -> Any:
    """Return the JSON type of a record's field: sequences become lists, and the keys of mappings become strings."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return typing.Union[tuple(map(_json_type, arguments))]  # noqa: UP007
    if origin is Sequence:
        return list[_json_type(arguments[0])]  # type: ignore[misc]
    if origin is Mapping:
        return dict[str, _json_type(arguments[1])]  # type: ignore[misc]
    return kind


SAMPLING_NAMES = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.init and field.name not in NOT_SAMPLING_FIELDS
)
"""Names of `SamplingParams` that are fields of every generation request."""
ONE_ANSWER_NAMES = tuple(name for name in SAMPLING_NAMES if name not in NOT_OF_ONE_ANSWER)
"""The sampling fields that `/v1/responses` has too."""
HTTP_OPTIONS = tuple(
    OPTION_NAMES.get(field.name, HttpOption(field.name, field.name))
    for field in dataclasses.fields(RequestOptions)
    if field.name not in NOT_OPTION_FIELDS
)
"""All options that a request may have."""


def struct_fields() -> list[tuple[str, Any, None]]:
    """Return all fields for `msgspec.defstruct`: name, type, and null as the default."""
    return sampling_struct_fields() + option_struct_fields()


def sampling_struct_fields(names: Sequence[str] = SAMPLING_NAMES) -> list[tuple[str, Any, None]]:
    """Return the fields of `SamplingParams`, as `struct_fields` does."""
    sampling = typing.get_type_hints(SamplingParams)
    kinds = {name: SAMPLING_TYPES.get(name, sampling[name]) for name in names}
    return [(name, _json_type(kind) | None, None) for name, kind in kinds.items()]


def option_struct_fields() -> list[tuple[str, Any, None]]:
    """Return the fields of `RequestOptions`, as `struct_fields` does."""
    kinds = typing.get_type_hints(RequestOptions)
    return [(option.http_name, _json_type(kinds[option.name]) | None, None) for option in HTTP_OPTIONS]


def sampling_values(body: object, names: Sequence[str] = SAMPLING_NAMES) -> dict[str, Any]:
    """Return the sampling fields that a body sets, without those that are null."""
    values = {name: getattr(body, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def option_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate options from the API's names and units to those of `RequestOptions`, leaving out null values."""
    values = {}
    for option in HTTP_OPTIONS:
        value = given.get(option.http_name)
        if value is not None:
            values[option.name] = value if option.per_unit == 1.0 else value / option.per_unit
    return values


def option_fields(options: RequestOptions) -> dict[str, Any]:
    """Return the options that differ from the defaults, under the API's names. Clients of this server use this."""
    fields = {}
    for option in HTTP_OPTIONS:
        value = getattr(options, option.name)
        if value != getattr(DEFAULT_OPTIONS, option.name):
            fields[option.http_name] = value if option.per_unit == 1.0 else value * option.per_unit
    return fields


# ---- what all bodies have in common ----------------------------------------------------------------------------------


class ApiRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Base class of records that clients send. JSON has no cycles, so the garbage collector can skip them."""

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported → the neutral values that are accepted."""
    UNUSED: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted and ignored, because they cannot change an answer of this server."""
    REPLACED: ClassVar[dict[str, str]] = {}
    """Fields of older APIs, which must be null → the field that replaces them."""

    def check_supported(self, path: str = "") -> None:
        """Refuse a field that asks for something this server does not do."""
        for name, neutral in self.NEUTRAL.items():
            value = getattr(self, name)
            if not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in neutral):
                raise _unsupported(f"{path}{name}")
        for name, replacement in self.REPLACED.items():
            if getattr(self, name) not in (None, [], "none"):
                raise _unsupported(f"{path}{name}", f" Send '{path}{replacement}'.")


def _unsupported(field: str, hint: str = "") -> Exception:
    return bad_request(f"'{field}' is not supported by this server.{hint}", param=field, code="unsupported_field")


def check_nesting(value: dict[str, Any], path: str) -> None:
    """Raise 400 for JSON that is nested too deeply."""
    if is_too_deep(value):
        raise bad_request(f"'{path}' is nested more than {MAX_NESTING} levels deep.", param=path)
