"""The chat on the page, in a real browser: what is asked, what comes, what stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.server.browser import PHONE, answer_to, ask, num_unnamed, picture, reload, wait_for_end, wait_for_text
from tests.unit.server.scripted_engine import ANSWER, ScriptedEngine

NEVER_S = 3600.0
STORE = "headway-chat"


def turns(page: Any) -> list[tuple[str, str]]:
    """Who said what, as it is seen."""
    return [
        (element.get_attribute("aria-label"), element.locator(".body").inner_text().strip())
        for element in page.locator(".message").all()
    ]


def test_chat_streams_and_tells_its_times(page: Any) -> None:
    ask(page, "Does it <b>never</b> stop?")
    wait_for_text(page, ".assistant .facts", "stopped at max tokens")
    assert page.text_content(".user .body") == "Does it <b>never</b> stop?"
    assert page.text_content(".assistant .body").startswith("a batch that never stops")
    facts = page.text_content(".assistant .facts")
    assert "first token" in facts and "tokens/s" in facts and f"{len(ANSWER.split())} tokens" in facts
    assert page.text_content("#chat-status").startswith("Answer: a batch")
    page.click("#new-chat")
    assert page.locator(".message").count() == 0 and page.locator("#welcome").is_visible()


def test_an_answer_can_be_stopped_or_left_for_a_new_chat_and_its_request_leaves_the_engine(
    page: Any, engine: ScriptedEngine
) -> None:
    engine._step_s = 0.2
    ask(page, "Go on and on")
    wait_for_text(page, ".assistant .body", "a batch")
    page.click("#stop")
    wait_for_text(page, ".assistant .facts", "stopped by you")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    assert page.locator("#send").is_visible() and page.input_value("#prompt") == ""
    ask(page, "Go on")
    wait_for_text(page, ".assistant:last-of-type .body", "a batch")
    page.click("#new-chat")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    assert turns(page) == [] and page.locator("#send").is_visible()
    answer_to(page, "Repeat: fresh")
    assert turns(page) == [("You", "Repeat: fresh"), ("Model", "fresh")]


def test_stopping_before_the_first_token_leaves_no_turn_and_the_question_in_the_box(
    page: Any, engine: ScriptedEngine
) -> None:
    answer_to(page, "First")
    engine._step_s = NEVER_S
    with page.expect_request("**/v1/chat/completions"):
        ask(page, "Too slow")
    wait_for_text(page, ".assistant:last-of-type .facts", "waiting for the first token")
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert [text for _, text in turns(page)] == ["First", ANSWER.strip()]
    assert page.input_value("#prompt") == "Too slow"
    assert page.locator("#failure").is_hidden()
    page.reload()
    assert len(turns(page)) == 2 and page.input_value("#prompt") == "Too slow"
    page.press("#prompt", "Enter")
    page.locator("#stop").wait_for(state="visible")
    page.fill("#prompt", "second thought")
    page.click("#stop")
    wait_for_end(page)
    assert page.input_value("#prompt") == "Too slow\n\nsecond thought", "what was typed meanwhile stays"


def test_after_an_error_the_prompt_is_in_the_box_and_can_be_tried_again(page: Any, app: Any) -> None:
    ask(page, "please fail")
    wait_for_text(page, "#failure", "The question is too hard.")
    assert turns(page) == [] and page.input_value("#prompt") == "please fail"
    picture(page, "error-wide")
    page.click("#retry")
    page.wait_for_function("() => document.querySelector('#failure-text').textContent !== ''")
    assert len(app.state.asked) == 2 and page.input_value("#prompt") == "please fail"
    page.fill("#prompt", "please")
    page.click("#retry")
    wait_for_text(page, ".assistant .facts", "tokens/s")
    wait_for_end(page)
    assert page.locator("#failure").is_hidden() and page.input_value("#prompt") == ""
    assert [message["content"] for message in app.state.asked[-1]] == ["please"]


def test_an_answer_that_is_cut_off_stays_until_the_retry_replaces_it(page: Any, app: Any) -> None:
    ask(page, "Do not break")
    wait_for_text(page, "#failure", "The engine stopped.")
    assert page.text_content(".assistant .body").startswith("a batch that never stops")
    assert "cut off" in page.text_content(".assistant .facts")
    assert page.input_value("#prompt") == "Do not break" and page.locator("#editing").is_visible()
    page.fill("#prompt", "Go on")
    page.click("#retry")
    wait_for_text(page, ".assistant .facts", "stopped at max tokens")
    wait_for_end(page)
    assert [text for who, text in turns(page) if who == "You"] == ["Go on"]
    assert [message["content"] for message in app.state.asked[-1]] == ["Go on"]


def test_a_server_that_goes_away_in_the_middle_is_an_error(page: Any) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream", body='data: {"choices": [{"delta": {"content": "Half"}}]}\n\n'
        ),
    )
    ask(page, "Whole?")
    wait_for_text(page, "#failure", "The connection was lost.")
    assert turns(page) == [("You", "Whole?"), ("Model", "Half")] and page.input_value("#prompt") == "Whole?"


def test_text_stays_selected_while_more_of_it_comes(page: Any, engine: ScriptedEngine) -> None:
    engine._step_s = 0.03
    ask(page, "Repeat: # Title\n\nA **finished** paragraph.\n\n- one\n- two\n\n" + "It goes on and on. " * 12)
    page.wait_for_function("() => document.querySelector('.assistant .body > p:last-child')?.textContent.length > 30")
    selected = page.evaluate("""() => {
        const body = document.querySelector(".assistant .body");
        const last = body.lastElementChild.firstChild;
        getSelection().setBaseAndExtent(body.querySelector("strong").firstChild, 2, last, 7);
        window.finished = [...body.querySelectorAll("h3, strong, li")];
        window.before = last.data.length;
        return getSelection().toString();
    }""")
    assert "nished" in selected and "two" in selected and selected.endswith("It goes")
    page.wait_for_function(
        "() => document.querySelector('.assistant .body').lastElementChild.textContent.length > window.before + 60"
    )
    assert page.locator("#stop").is_visible(), "it still streams"
    assert page.evaluate("getSelection().toString()") == selected
    assert page.evaluate("window.finished.every((element) => element.isConnected)")
    picture(page, "selected-while-streaming")
    wait_for_end(page)
    assert page.evaluate("getSelection().toString()") == selected


def test_the_conversation_survives_a_reload(page: Any, app: Any) -> None:
    page.click("#params summary")
    page.fill("#system", "Be brief.")
    answer_to(page, "Repeat: **Bold** words")
    facts = page.text_content(".assistant .facts")
    page.fill("#prompt", "half a thought")
    reload(page)
    assert turns(page) == [("You", "Repeat: **Bold** words"), ("Model", "Bold words")]
    assert page.text_content(".assistant strong") == "Bold" and page.text_content(".assistant .facts") == facts
    assert page.input_value("#prompt") == "half a thought" and page.input_value("#system") == "Be brief."
    answer_to(page, "And?")
    said = [(message["role"], message["content"]) for message in app.state.asked[-1]]
    assert said == [
        ("system", "Be brief."),
        ("user", "Repeat: **Bold** words"),
        ("assistant", "**Bold** words"),
        ("user", "And?"),
    ]
    page.click("#new-chat")
    reload(page)
    assert turns(page) == [] and page.locator("#welcome").is_visible()


def test_a_reload_in_the_middle_keeps_what_has_come(page: Any, engine: ScriptedEngine) -> None:
    engine._step_s = 0.1
    ask(page, "Go on")
    wait_for_text(page, ".assistant .body", "never")
    reload(page)
    assert turns(page)[0] == ("You", "Go on") and turns(page)[1][1].startswith("a batch that never")
    assert page.locator("#send").is_visible()


def test_something_else_in_the_storage_is_left_aside(page: Any) -> None:
    for stored in (
        "no JSON",
        '{"version": 99, "turns": [{"role": "user", "content": "x", "facts": ""}]}',
        '{"version": 1, "turns": [{"role": "assistant", "content": 3}]}',
        "null",
        '{"version": 1, "turns": {}, "draft": 3}',
    ):
        loaded = page.evaluate(
            """async ([key, stored]) => {
                localStorage.setItem(key, stored);
                return (await import("/web/stored_chat.js")).loadChat();
            }""",
            [STORE, stored],
        )
        assert loaded == {"turns": [], "draft": "", "settings": {}}, stored
    page.reload()
    assert turns(page) == [] and page.locator("#welcome").is_visible()
    ask(page, "Hello")
    wait_for_text(page, ".assistant .facts", "tokens/s")


def test_what_is_stored_is_bounded_and_the_last_turns_are_kept(page: Any) -> None:
    stored = page.evaluate(
        """async (key) => {
        const { saveChat, loadChat } = await import("/web/stored_chat.js");
        const content = "x".repeat(40_000);
        const turns = Array.from({ length: 40 }, (_, i) => (
            { role: i % 2 ? "assistant" : "user", content: `${i} ${content}`, facts: "", element: document.body }
        ));
        saveChat({ turns, draft: "y".repeat(1_000), settings: {} });
        const kept = loadChat().turns.map((turn) => parseInt(turn.content));
        return { chars: localStorage.getItem(key).length, turns: kept };
    }""",
        STORE,
    )
    assert stored["chars"] <= 505_000
    assert stored["turns"] == list(range(40 - len(stored["turns"]), 40)) and 10 <= len(stored["turns"]) <= 12


def test_a_page_that_was_only_looked_at_does_not_overwrite_the_chat_of_another(page: Any, base_url: str) -> None:
    looked_at = page.context.new_page()
    looked_at.goto(base_url)
    wait_for_text(looked_at, "#health", "serving")
    answer_to(page, "Hello")
    looked_at.close(run_before_unload=True)
    reload(page)
    assert len(turns(page)) == 2


def test_answers_questions_and_code_can_be_copied(page: Any) -> None:
    answer = "Do **this**:\n\n```python\nprint(1)\nprint(2)\n```"
    answer_to(page, f"Repeat: {answer}")
    clipboard = "navigator.clipboard.readText()"
    page.click(".assistant .actions .copy")
    wait_for_text(page, "#chat-status", "Copied.")
    assert page.evaluate(clipboard) == answer
    page.click(".copy-code")
    page.locator(".copy-code[data-copied=Copied]").wait_for()
    assert page.evaluate(clipboard) == "print(1)\nprint(2)"
    page.click(".user .actions .copy")
    page.locator(".user [data-copied=Copied]").wait_for()
    assert page.evaluate(clipboard) == f"Repeat: {answer}"


def test_copying_works_without_the_clipboard_of_secure_pages(base_url: str, open_page: Callable[..., Any]) -> None:
    page = open_page(
        base_url,
        script="""
        Object.defineProperty(navigator, "clipboard", { value: undefined });
        document.addEventListener("copy", () => (window.copied = document.activeElement.value));
        """,
    )
    answer_to(page, "Repeat: short")
    page.click(".assistant .copy")
    wait_for_text(page, "#chat-status", "Copied.")
    assert page.evaluate("window.copied") == "short"


def test_the_last_answer_can_be_made_again(page: Any, app: Any, engine: ScriptedEngine) -> None:
    for question in ("One", "Two"):
        answer_to(page, question)
    assert page.locator(".regenerate:visible").count() == 1
    page.click(".regenerate:visible")
    wait_for_end(page)
    assert [text for who, text in turns(page) if who == "You"] == ["One", "Two"] and len(turns(page)) == 4
    assert app.state.asked[2] == app.state.asked[1]
    engine._step_s = NEVER_S
    page.click(".regenerate:visible")
    wait_for_text(page, ".assistant:last-of-type .facts", "waiting for the first token")
    page.click("#stop")
    wait_for_end(page)
    assert len(turns(page)) == 4 and turns(page)[-1][1] != "", "the answer before is back"
    assert page.input_value("#prompt") == ""


def test_a_question_can_be_edited_and_what_followed_is_replaced(page: Any, app: Any) -> None:
    for question in ("One", "Two", "Three"):
        answer_to(page, question)
    page.fill("#prompt", "a draft")
    page.locator(".user .edit").nth(1).click()
    assert page.input_value("#prompt") == "Two" and page.locator("#editing").is_visible()
    assert page.evaluate("document.activeElement.id") == "prompt" and page.locator(".replaced").count() == 4
    page.keyboard.press("Escape")
    assert page.input_value("#prompt") == "a draft" and page.locator(".replaced").count() == 0
    page.locator(".user .edit").nth(1).click()
    answer_to(page, "Two and a half")
    assert [text for who, text in turns(page) if who == "You"] == ["One", "Two and a half"]
    assert [m["content"] for m in app.state.asked[-1] if m["role"] == "user"] == ["One", "Two and a half"]
    assert page.locator("#editing").is_hidden()
    page.locator(".user .edit").nth(0).click()
    ask(page, "fail, please")
    wait_for_text(page, "#failure", "too hard")
    assert [text for who, text in turns(page) if who == "You"] == ["One", "Two and a half"], "what it would replace"
    assert page.input_value("#prompt") == "fail, please" and page.locator("#editing").is_visible()


def test_the_chat_works_by_keyboard_and_on_a_narrow_screen(page: Any) -> None:
    page.set_viewport_size({**PHONE, "width": 400})
    answer_to(page, "Repeat: | a | b |\n|---|---|\n| " + "wide " * 30 + " | 2 |\n\n```\n" + "long " * 40 + "\n```")
    picture(page, "narrow-markdown")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert page.evaluate("(list) => list.scrollWidth <= list.clientWidth", page.query_selector("#messages"))
    page.focus(".assistant .actions .copy")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('regenerate')")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert num_unnamed(page) == 0
