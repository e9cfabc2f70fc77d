"""Request fields that constrain the output's text: `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from headway.server.api.api_errors import bad_request
from headway.server.api.record_fields import ApiRecord, check_nesting


class JsonSchemaFormat(ApiRecord, kw_only=True):
    """A schema and its name. Answers follow the schema with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(ApiRecord, kw_only=True):
    """Free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """The schema for `json_object`, as some other servers accept it."""

    def check_supported(self, path: str = "") -> None:
        """Refuse a schema that does not belong to `type`."""
        if self.json_schema is not None and self.type != "json_schema":
            raise bad_request(
                f"'{path}json_schema' needs '{path}type' to be 'json_schema'.", param=f"{path}json_schema"
            )
        if self.schema is not None and self.type != "json_object":
            hint = f" Send '{path}json_schema.schema'." if self.type == "json_schema" else ""
            raise bad_request(f"'{path}schema' goes with the type 'json_object' only.{hint}", param=f"{path}schema")
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema is None):
            name = f"{path}json_schema" if self.json_schema is None else f"{path}json_schema.schema"
            raise bad_request(f"'{name}' is required.", param=name)
        given = self.given_schema
        if given is not None:
            check_nesting(given, f"{path}{self.schema_path}")

    @property
    def given_schema(self) -> dict[str, Any] | None:
        """The schema, from either of the two fields that may have it."""
        return self.schema if self.json_schema is None else self.json_schema.schema

    @property
    def schema_path(self) -> str:
        """The path of that field."""
        return "schema" if self.json_schema is None else "json_schema.schema"


class StructuredOutputs(ApiRecord, kw_only=True):
    """vLLM's field for what a text must match: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    def check_supported(self, path: str = "") -> None:
        """Require exactly one kind of constraint, with options that belong to it."""
        given = self.given
        if len(given) != 1:
            raise bad_request(
                f"'{path[:-1]}' must have exactly one of 'json', 'regex', 'choice', 'grammar' and 'json_object'; it "
                f"has {len(given)}.",
                param=path[:-1],
            )
        if isinstance(self.json, dict):
            check_nesting(self.json, f"{path}json")
        for name in self.options:
            if "json" not in given and "json_object" not in given:
                raise bad_request(f"'{path}{name}' goes with 'json' and 'json_object' only.", param=f"{path}{name}")

    @property
    def given(self) -> dict[str, Any]:
        """The kinds of constraint that are set, with their values."""
        return self._said(("json", "regex", "choice", "grammar", "json_object"))

    @property
    def options(self) -> dict[str, Any]:
        """The options of the constraint that are set."""
        return self._said(("disable_any_whitespace", "whitespace_pattern"))

    def _said(self, names: Sequence[str]) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None and value is not False}
