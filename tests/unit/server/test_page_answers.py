"""Answers that are not prose, on the page in a real browser: JSON, calls, thoughts, and how they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.unit.server.browser import PHONE, answer_to, ask, num_unnamed, picture, reload, wait_for_end, wait_for_text
from tests.unit.server.scripted_engine import ScriptedEngine


def call_delta(index: int = 0, arguments: str = "", **more: Any) -> dict[str, Any]:
    """As the server streams calls: first the name and the id, then the arguments, piece by piece."""
    name = {"name": more.pop("name")} if "name" in more else {}
    return {"tool_calls": [{"index": index, "function": {**name, "arguments": arguments}, **more}]}


CALL = [
    call_delta(id="call_1", type="function", name="weather"),
    call_delta(arguments='{"city": "Ro'),
    call_delta(arguments='me"}'),
]
OTHER_CALL = [call_delta(1, "{}", id="call_2", type="function", name="clock")]


def ask_for(page: Any, deltas: list[dict[str, Any]]) -> None:
    """For an answer of these deltas."""
    answer_to(page, f"Deltas: {json.dumps(deltas)}")


def choose(page: Any, kind: str) -> None:
    if page.locator("#format").is_hidden():
        page.click("#format-toggle")
    page.locator(f"#format input[value={kind}]").check()


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_each_format_is_sent_as_its_fields(page: Any, app: Any) -> None:
    assert page.locator("#format").is_hidden() and page.inner_text("#format-toggle").startswith("Answer: free text")
    schema = json.loads(page.input_value("#schema"))
    wanted = {
        "json": {"response_format": {"type": "json_object"}},
        "schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            }
        },
        "choice": {"structured_outputs": {"choice": ["red", "dark blue"]}},
        "text": {},
    }
    page.evaluate("document.querySelector('#choices').value = ' red\\n\\ndark blue\\nred'")
    for kind, fields in wanted.items():
        choose(page, kind)
        answer_to(page, "Repeat: x")
        sent = {name: app.state.bodies[-1].get(name) for name in ("response_format", "structured_outputs", "tools")}
        assert {name: value for name, value in sent.items() if value is not None} == fields, kind


def test_what_cannot_be_sent_is_said_beside_its_box(page: Any, app: Any) -> None:
    for kind, box, text, words in (
        ("schema", "schema", '{"type": "object",}', "This is not JSON"),
        ("schema", "schema", "[]", "A schema is an object"),
        ("choice", "choices", " \n", "at least one choice"),
        ("text", "tools", "{}", "Tools are a list"),
    ):
        choose(page, kind)
        page.set_checked("#with-tools", box == "tools")
        page.fill(f"#{box}", text)
        page.click("#format-toggle")
        ask(page, "Hello")
        assert words in page.text_content(f"#{box}-error") and page.locator(f"#{box}-error").is_visible()
        assert page.evaluate("document.activeElement.id") == box
        assert app.state.bodies == [] and page.input_value("#prompt") == "Hello"
        page.fill(f"#{box}", '[{"type": "function", "function": {"name": "f"}}]' if box == "tools" else "{}")
        assert page.locator(f"#{box}-error").is_hidden(), "it goes as soon as the text is right"
    page.press("#prompt", "Enter")
    wait_for_text(page, ".assistant .facts", "tokens/s")


def test_a_refusal_is_shown_beside_the_box_that_is_to_blame(page: Any) -> None:
    choose(page, "schema")
    page.click("#format-toggle")
    ask(page, "Refuse: response_format.json_schema.schema.type")
    wait_for_text(page, "#failure", "response_format.json_schema.schema.type: not like this.")
    assert page.locator("#format").is_visible()
    assert page.text_content("#schema-error") == "schema.type: not like this."
    assert page.get_attribute("#schema", "aria-invalid") == "true"
    page.check("#with-tools")
    ask(page, "Refuse: tools[0].x")
    wait_for_text(page, "#tools-error", "tools[0].x: not like this.")
    assert page.locator("#schema-error").is_hidden()


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_json_is_laid_out_and_stored_results_stay_with_their_calls(page: Any) -> None:
    layout = "async (text) => (await import('/web/json_text.js')).layOut(text)"
    for written, lines in (
        ('{"a":1e400,"b":[],"c":{ }}', ["{", '  "a": 1e400,', '  "b": [],', '  "c": {}', "}"]),
        ('{"d":[1,\n"x, {y}"]}', ["{", '  "d": [', "    1,", '    "x, {y}"', "  ]", "}"]),
        ('{"a\\"b": "c', ["{", '  "a\\"b": "c']),
        ('["\\', ["[", '  "\\']),
        ("toString constructor }]", ["toString constructor", "}", "]"]),
        ("", [""]),
    ):
        assert page.evaluate(layout, written).split("\n") == lines
    assert page.evaluate(layout, "[" * 5000).count(" ") < 5000 * 49, "it does not grow with the square of the depth"
    kept = page.evaluate("""async () => {
        const { saveChat, loadChat } = await import("/web/stored_chat.js");
        const [big, small] = ["x".repeat(300_000), "x"];
        const calls = [{ id: "1", name: "f", arguments: "{}" }];
        const results = [{ id: "1", name: "f", content: big }];
        const asked = { role: "user", content: big, facts: "" };
        const called = { role: "assistant", content: "", facts: "", calls };
        const told = { role: "tool", content: "", facts: "", results };
        const said = { role: "assistant", content: small, facts: "" };
        const keeps = (...turns) => {
            saveChat({ turns, draft: "", settings: {} });
            return loadChat().turns.map(({ role }) => role);
        };
        const short = { ...told, results: [{ ...results[0], content: small }] };
        return [
            keeps(asked, called, told, said),
            keeps(asked, called, short, said),
            keeps(asked, said, short, said),
            keeps(asked, { ...called, calls: [{ id: 1 }] }),
        ];
    }""")
    assert kept == [[], ["user", "assistant", "tool", "assistant"], [], []]


def test_json_is_pretty_and_says_whether_it_parsed(page: Any, engine: ScriptedEngine) -> None:
    for text, num_json in (('{"a": [1]}', 1), ("[a](b) {c}", 1), ("42", 1)):  # free text that is JSON is shown as such
        answer_to(page, f"Repeat: {text}")
        assert page.locator(".json").count() == num_json, text
    page.click("#new-chat")
    choose(page, "json")
    ask(page, 'Repeat: {"name":"Ada","age":36}')
    wait_for_text(page, ".assistant .mark", "parsed")
    assert page.text_content(".assistant .json code") == '{\n  "name": "Ada",\n  "age": 36\n}'
    ask(page, 'Repeat: {"name": "A')
    wait_for_text(page, ".assistant:last-of-type .mark", "does not parse")
    wait_for_end(page)
    assert page.text_content(".assistant:last-of-type .json code") == '{\n  "name": "A'
    engine._step_s = 0.2
    ask(page, 'Repeat: {"name": "Ada", "age": 36, "likes": [' + '"sums", ' * 100)  # it ends by the button, if at all
    wait_for_text(page, ".assistant:last-of-type .json code", '\n  "age"')
    assert page.text_content(".assistant:last-of-type .mark").strip() == "…", "nothing is said before the end"
    page.click("#stop")
    wait_for_end(page)
    reload(page)
    assert page.locator(".json").count() == 3 and page.locator(".mark.good").count() == 1
    assert page.locator("#format input[value=json]").is_checked()


def test_a_call_is_shown_and_its_result_is_sent_back(page: Any, app: Any) -> None:
    page.set_viewport_size(PHONE)
    page.click("#format-toggle")
    page.check("#with-tools")
    page.check("#must-call")
    page.click("#format-toggle")
    assert page.text_content("#format-toggle") == "Answer: free text, tools"
    ask_for(page, [{"reasoning_content": "Look it up."}, *CALL])
    assert app.state.bodies[-1]["tool_choice"] == "required"
    assert page.text_content(".call .code-head b") == "weather"
    picture(page, "call-phone")
    rest = "(list) => list.scrollHeight - list.scrollTop - list.clientHeight"
    assert page.evaluate(rest, page.query_selector("#messages")) < 2, "the box for the result is in sight"
    assert page.text_content(".call code") == '{\n  "city": "Rome"\n}'
    assert page.text_content("#chat-status") == 'Answer: Calls weather with {"city": "Rome"}'
    page.press(".results textarea", "Enter")
    assert len(app.state.bodies) == 1, "there is no result yet"
    page.fill(".results textarea", "Refuse: nothing")
    page.click(".results button")
    wait_for_text(page, "#failure", "not like this")
    assert page.input_value(".results textarea") == "Refuse: nothing" and page.input_value("#prompt") == ""
    page.fill(".results textarea", '{"degrees": 21}')
    page.press(".results textarea", "Enter")
    wait_for_end(page)
    assert page.locator(".results:visible").count() == 0
    assert page.text_content(".message.tool b") == "weather" and '"degrees": 21' in page.text_content(
        ".message.tool code"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    assert app.state.asked[-1][1:] == [
        {"role": "assistant", "content": "", "reasoning_content": "Look it up.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 21}'},
    ]
    assert app.state.bodies[-1]["tool_choice"] == "auto", "a result may be followed by an answer"
    reload(page)
    assert page.locator(".message").count() == 4 and page.locator("#with-tools").is_checked()
    page.click(".regenerate:visible")
    wait_for_end(page)
    assert app.state.asked[-1] == app.state.asked[-2]


def test_calls_are_answered_together_and_a_call_that_was_cut_off_is_not(page: Any, app: Any) -> None:
    ask_for(page, [{"content": "Both."}, *CALL, *OTHER_CALL])
    first, second = page.locator(".results textarea").all()
    first.fill("21")
    first.press("Enter")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.results textarea')[1]")
    second.fill("noon")
    second.press("Enter")
    wait_for_end(page)
    results = [(message["tool_call_id"], message["content"]) for message in app.state.asked[-1][-2:]]
    assert results == [("call_1", "21"), ("call_2", "noon")]
    ask_for(page, CALL[:-1])
    assert "does not parse" in page.text_content(".assistant:last-of-type .call .mark")
    assert page.locator(".results:visible").count() == 0
    answer_to(page, "Repeat: on")
    assert app.state.asked[-1][-2] == {"role": "assistant", "content": ""}


def test_thoughts_are_open_until_the_answer_begins(page: Any, engine: ScriptedEngine) -> None:
    engine._step_s = 0.15
    thoughts = [{"reasoning_content": f"thought {i}. "} for i in range(4)]
    ask(page, f"Deltas: {json.dumps([*thoughts, {'content': 'So: '}, {'content': '**yes**'}])}")
    wait_for_text(page, ".thoughts div", "thought 1.")
    picture(page, "thinking-wide")
    assert page.text_content(".thoughts summary") == "Thinking …" and page.locator(".thoughts div").is_visible()
    wait_for_end(page)
    assert page.text_content(".thoughts summary") == "Thoughts" and page.locator(".thoughts div").is_hidden()
    assert page.inner_text(".assistant .body") == "So: yes"
    page.focus(".thoughts summary")
    page.keyboard.press("Enter")
    assert page.inner_text(".thoughts div") == "thought 0. thought 1. thought 2. thought 3."


def test_a_phone_shows_it_without_scrolling_sideways_and_the_keyboard_reaches_it(
    base_url: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(base_url, viewport=PHONE, scheme="dark")
    ask_for(
        page,
        [
            {"reasoning_content": "x" * 300},
            {"content": "{" * 90},
            CALL[0],
            call_delta(arguments=json.dumps({"text": "wide" * 80})),
        ],
    )
    page.focus("#new-chat")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#schema").is_visible() and page.locator("input[value=schema]").is_checked()
    page.check("#with-tools")
    picture(page, "answers-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for part in ("#messages", "#format"):
        assert page.evaluate("(part) => part.scrollWidth <= part.clientWidth", page.query_selector(part)), part
    assert num_unnamed(page) == 0
