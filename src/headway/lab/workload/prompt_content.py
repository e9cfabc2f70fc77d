"""Real prompts: texts of a JSON Lines file, with the length of the real answer where the file has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headway.errors import ConfigError
from headway.lab.workload.data_file import DataFile, Row, field_of, number_of
from headway.lab.workload.drawing import Draft, Drawing
from headway.lab.workload.options_table import OptionsTable
from headway.lab.workload.trace_rows import Trace

_USUAL_FIELDS = ("prompt", "question", "turns", "text")


@dataclass(frozen=True)
class PromptContent:
    file: DataFile
    field: str | None = None
    """Of the prompt; None: the first of the usual names that is there. Of a list (`turns`), its first."""
    answer_field: str | None = None
    """A text or a number of tokens, for the length of the answer; None: lengths come from the workload."""
    is_chat: bool = False
    """Put into the model's chat template."""
    is_shuffled: bool = False

    has_text: ClassVar[bool] = True

    def draw(self, drawing: Drawing, count: int) -> list[Draft]:
        rows = list(self.file.rows())
        if not rows:
            raise ConfigError(f"The data file '{self.file.name}' has no rows.")
        if self.is_shuffled:
            drawing.rng("order").shuffle(rows)
        rows = [rows[place % len(rows)] for place in range(count)]
        lengths = drawing.output_lengths(count) if self.answer_field is None else None
        drafts = []
        for line, row in rows:
            length = next(lengths) if lengths is not None else self._answer_length(row, line, drawing)
            num_out = drawing.limits.output(length)
            prompt = drawing.prompt_tokens(self._text(row, line), is_chat=self.is_chat)
            if not prompt:
                raise self.file.fail(line, "the prompt is empty")
            drafts.append(Draft(drawing.limits.cut(prompt, num_out), num_out))
        return drafts

    def num_available(self, trace: Trace | None) -> int | None:
        return sum(1 for _ in self.file.rows())

    def _text(self, row: Row, line: int) -> str:
        name = self.field or next((usual for usual in _USUAL_FIELDS if usual in row), _USUAL_FIELDS[0])
        value: Any = field_of(row, name, file=self.file, line=line)
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise self.file.fail(line, f"'{name}' must be a text, or a list that begins with one")
        return value

    def _answer_length(self, row: Row, line: int, drawing: Drawing) -> int:
        assert self.answer_field is not None
        value = field_of(row, self.answer_field, file=self.file, line=line)
        if isinstance(value, str):
            return max(1, len(drawing.tokens(value)))
        return max(1, round(number_of(row, self.answer_field, file=self.file, line=line)))


def read_prompt_content(table: OptionsTable, folders: tuple[Path, ...]) -> PromptContent:
    """From the table `[content]`."""
    table.only("kind", "file", "field", "answer_field", "chat", "order")
    return PromptContent(
        DataFile(table.text("file"), folders),
        field=table.text("field") if "field" in table else None,
        answer_field=table.text("answer_field") if "answer_field" in table else None,
        is_chat=table.switch("chat", False),
        is_shuffled=table.choice("order", ("file", "random"), "file") == "random",
    )
