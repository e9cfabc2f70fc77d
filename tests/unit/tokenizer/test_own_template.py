"""The operator's own chat template: from a file or a text, tried before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.config import EngineConfig, ModelConfig
from headway.errors import ConfigError
from headway.front.deployment import Deployment
from headway.loader.chosen_model import load_model_tokenizer
from headway.tokenizer.own_template import use_chat_template

GOOD = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
QUESTION = [{"role": "user", "content": "Hi"}]
PLAIN = Path(__file__).parents[3] / "docs" / "examples" / "plain.jinja"


def prompt(template: str, **extra: object) -> str:
    tokenizer = load_model_tokenizer(ModelConfig(chat_template=template))
    assert tokenizer is not None
    return tokenizer.apply_chat_template(QUESTION, **extra)


def test_a_file_or_a_text_takes_the_place_of_the_models(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(GOOD)
    assert prompt(GOOD) == prompt(str(file)) == prompt(GOOD, tools=[{"type": "function"}]) == "<user>Hi"
    assert prompt(str(PLAIN)) == "[user] Hi\n[assistant]"
    tokenizer = load_model_tokenizer(ModelConfig(chat_template=str(file)))
    assert tokenizer is not None and tokenizer.chat_template == GOOD


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("/no/such.jinja", r"^chat_template '/no/such.jinja': the file cannot be read: No such file"),
        (str(PLAIN.parent), r"it is a folder"),
        ("/dev/zero", r"it has more than 1,048,576 bytes"),
        ("{{ messages[0] ", r"^chat_template: TemplateSyntaxError: .*\(line 1\)"),
        ("a\n{% endfor %}", r"^chat_template: TemplateSyntaxError: .*\(line 2\)"),
        ("{{ messages[0].content }}{{ missing.part }}", r"^chat_template: UndefinedError: 'missing' is undefined"),
        ("{{ raise_exception('not me') }}", r"not me"),
        ("Hello.\n", r"the prompt that it makes of a question does not contain the question"),
    ],
)
def test_what_makes_no_prompt_is_refused_at_once(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prompt(template)


def test_a_template_for_questions_alone_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert prompt("{{ messages[0].content }}{% if messages[1] %}{{ raise_exception('one') }}{% endif %}") == "Hi"
    assert "fails on a longer conversation" in caplog.text


def test_without_a_template_or_a_tokenizer() -> None:
    use_chat_template(None, None)
    with pytest.raises(ConfigError, match="this model has no tokenizer"):
        use_chat_template(None, GOOD)
    with pytest.raises(ConfigError, match="chat_template is empty"):
        EngineConfig.from_options(chat_template="")


def test_engine_processes_do_not_get_it() -> None:
    """They may run on another machine, where there is no such file."""
    [spec] = Deployment({"chat_template": "chat.jinja", "block_size": 16}).specs
    assert spec.options == {"block_size": 16}
