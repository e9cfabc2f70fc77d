"""The page in a real browser, against a pretended engine: the batch, and the page as a whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from headway.front.engine_client import Health
from tests.unit.server.browser import DRAWN_TEXT, PHONE, WIDE, ask, number, picture, pixels, wait_for_text, wait_until
from tests.unit.server.http_thread import serving
from tests.unit.server.scripted_engine import ScriptedEngine, ScriptedReplicas, create_app

NUMBERS = (
    "output",
    "prompt",
    "running",
    "waiting",
    "ttft",
    "itl",
    "kv",
    "hits",
    "preempt",
    "use",
    "useful",
    "host",
    "nvml",
)


def test_the_key_is_sent_and_asked_for(engine: ScriptedEngine, open_page: Callable[..., Any]) -> None:
    with serving(create_app(engine, api_key="sesame")) as url:
        page = open_page(url, expect="no access")
        wait_for_text(page, "#lost", "asks for an API key")
        ask(page, "open")
        wait_for_text(page, "#failure", "asks for an API key")
        page.click("#params summary")
        page.fill("#api-key", "wrong")
        page.press("#api-key", "Tab")
        wait_for_text(page, "#lost", "does not know this API key")
        page.fill("#api-key", "sesame")
        page.press("#api-key", "Tab")
        wait_for_text(page, "#health", "serving")
        ask(page, "open")
        wait_for_text(page, ".assistant:last-of-type .facts", "tokens/s")


def test_prices_have_tiles_if_a_device_has_a_price(
    base_url: str, engine: ScriptedEngine, open_page: Callable[..., Any]
) -> None:
    """Two tiles in a row of their own, also on a phone; without a price there are none."""
    plain = open_page(base_url)
    wait_for_text(plain, "#n-running", "0")
    assert plain.locator(".tiles .price:visible").count() == 0
    told = {"recent_input": 0.01234, "recent_output": 1.5, "input": None, "output": 123.4}
    with serving(create_app(engine, prices=lambda: told)) as url:
        page = open_page(url)
        wait_for_text(page, "#n-price-recent", "0.0123 / 1.50")
        wait_for_text(page, "#n-price", "– / 123")
        assert page.locator(".tiles .price:visible").count() == 2
        picture(page, "prices-wide")
        page.set_viewport_size(PHONE)
        page.click("#tab-batch")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        picture(page, "prices-phone")


def test_load_shows_in_the_batch_of_a_phone(page: Any) -> None:
    page.set_viewport_size(PHONE)
    assert page.locator("#batch").is_hidden()
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-batch"
    assert page.locator("#batch").is_visible() and page.locator("#chat").is_hidden()
    assert "Idle" in page.text_content("#advice")
    page.wait_for_timeout(300)
    before = {name: pixels(page, name) for name in ("#lanes", "#blocks", "#c-requests", "#c-use")}
    page.click("#load")
    shown = "parseFloat(document.querySelector('{}').textContent)"
    for name, least in (("#n-running", 8), ("#n-kv", 1), ("#n-output", 1)):
        page.wait_for_function(f"() => {shown.format(name)} >= {least}")
    page.wait_for_timeout(1200)
    wait_for_text(page, "#n-use", "%")
    assert number(page, "#n-useful") == 100 and page.text_content("#n-nvml") == "–"
    for name, old in before.items():
        assert pixels(page, name) != old, name
    picture(page, "load-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.wait_for_function("() => parseInt(document.querySelector('#load-status').textContent) >= 10")
    assert "failed" not in page.text_content("#load-status")


def test_cached_and_shared_blocks_are_shown_and_stay_when_all_is_quiet(
    base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine
) -> None:
    page = open_page(base_url)
    assert page.text_content("#n-hits") == "–"
    assert page.locator("#replicas").is_hidden() and page.locator("#replicas button").count() == 0
    page.wait_for_timeout(300)
    empty = pixels(page, "#blocks")
    page.click("#load")
    wait_for_text(page, "#blocks-text", "requests per block")
    wait_for_text(page, "#n-hits", "%")
    assert number(page, "#n-hits") > 0
    picture(page, "load-wide")
    page.click("#load-cancel")
    wait_for_text(page, "#load-status", "cancelled")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    wait_for_text(page, "#blocks-text", "0 of 320 in use")
    assert "cached" in page.text_content("#blocks-text") and engine.stats.blocks.num_cached_blocks > 0
    page.wait_for_timeout(300)
    assert pixels(page, "#blocks") != empty
    later = open_page(base_url)
    wait_for_text(later, "#blocks-text", "cached")
    later.wait_for_timeout(300)
    assert pixels(later, "#blocks") != empty, "who comes later sees them too"


def test_theme_follows_the_system_until_somebody_chooses(page: Any) -> None:
    page.emulate_media(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")
    light = page.evaluate(background)
    assert dark != light
    page.reload()
    assert page.evaluate(background) == light


def test_nobody_looks_at_a_hidden_page(page: Any, engine: ScriptedEngine) -> None:
    assert len(engine.viewers) == 1
    page.evaluate("""() => {
        Object.defineProperty(document, "hidden", { value: true, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }""")
    wait_until(page, lambda: engine.viewers == [])


def test_the_field_for_the_key_takes_the_whole_line(page: Any) -> None:
    page.click("#params summary")
    field = page.locator("#api-key")
    for viewport in (WIDE, PHONE):
        page.set_viewport_size(viewport)
        assert field.bounding_box()["width"] >= 0.9 * page.locator("#system").bounding_box()["width"]
        page.evaluate("document.querySelector('#api-key').type = 'text'")
        page.fill("#api-key", "sk-" + "0123456789abcdef" * 3)
        assert viewport is PHONE or field.evaluate("(field) => field.scrollWidth <= field.clientWidth")


def test_your_own_request_is_on_top_of_the_others_and_stays_there(
    base_url: str, open_page: Callable[..., Any], engine: ScriptedEngine
) -> None:
    page = open_page(base_url, script=DRAWN_TEXT)
    page.click("#load")
    page.wait_for_function("() => Number(document.querySelector('#n-running').textContent) >= 8")
    engine._step_s = 0.06
    ask(page, "Repeat:" + "Where am I? " * 25)
    page.wait_for_function("() => window.drawn.get('sent, no token yet')?.y < 16")
    page.wait_for_function(
        "() => window.drawn.get('you')?.y < 16 && document.querySelector('.assistant .body').textContent !== ''"
    )
    page.evaluate("window.drawn.clear()")
    page.wait_for_function("() => window.drawn.has('you') && window.drawn.has('decode')")
    assert page.evaluate("window.drawn.get('you').y") < 16
    others = page.evaluate("[...window.drawn].filter(([text]) => /^#[0-9]+$/.test(text)).map(([, place]) => place.y)")
    assert others and min(others) > 16
    picture(page, "own-on-top")
    page.evaluate("document.querySelector('.lanes').style.height = '60px'")
    page.evaluate("document.querySelector('.lanes').scrollTop = 100")
    page.wait_for_function("() => window.drawn.get('you').y > 100 && window.drawn.get('you').y < 116")


def test_a_lost_server_is_shown_as_lost_and_not_as_its_last_numbers(
    engine: ScriptedEngine, open_page: Callable[..., Any]
) -> None:
    with serving(create_app(engine)) as url:
        page = open_page(url)
        page.click("#load")
        page.wait_for_function("() => Number(document.querySelector('#n-running').textContent) >= 4")
        wait_for_text(page, "#n-itl", "ms")
    wait_for_text(page, "#lost-title", "The server is lost.")
    assert page.locator("#lost").is_visible() and page.locator("#reconnect").is_visible()
    assert page.text_content("#health span") == "lost"
    assert {name: page.text_content(f"#n-{name}") for name in NUMBERS} == dict.fromkeys(NUMBERS, "–")
    assert page.text_content("#advice") == "" and page.text_content("#queue") == ""
    page.wait_for_function("() => document.querySelector('#v-requests').textContent === 'running –waiting –'")
    picture(page, "lost-wide")


def test_a_server_that_drains_is_restarting_and_not_lost(
    app: Any, engine: ScriptedEngine, open_page: Callable[..., Any]
) -> None:
    with serving(app) as url:
        page = open_page(url)
        app.state.is_draining = True
        engine.health = Health(False, "the server is shutting down")
        wait_for_text(page, "#health", "restarting")
        assert page.text_content("#n-running") == "0" and page.locator("#lost").is_hidden()
    wait_for_text(page, "#lost-title", "The server is restarting.")
    assert page.text_content("#health span") == "restarting"


def test_a_server_that_falls_silent_is_lost_too(base_url: str, open_page: Callable[..., Any]) -> None:
    """It still holds the connection, as one that is stopped or cut off by the network does: only the time tells."""
    page = open_page(base_url, script="/* not the kept one: its clock is to go on */")
    page.clock.install()
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_function("() => document.querySelector('#n-running').textContent === '0'")
    page.clock.pause_at(datetime.now() + timedelta(seconds=6))
    wait_for_text(page, "#lost", "has said nothing for 5 s")
    assert page.text_content("#n-running") == "–"


def test_an_engine_that_is_away_has_no_numbers_until_it_is_back(page: Any, engine: ScriptedEngine) -> None:
    assert page.text_content("#n-running") == "0"
    engine.health = Health(False, "the engine is being restarted")
    wait_for_text(page, "#lost", "The engine is not available. the engine is being restarted")
    assert page.text_content("#n-running") == "–"
    engine.health = Health(True, "")
    wait_for_text(page, "#health", "serving")
    assert page.text_content("#n-running") == "0" and page.locator("#lost").is_hidden()


def test_the_page_finds_its_server_again_which_may_serve_another_model(page: Any, app: Any) -> None:
    """The name that the page sends is asked for anew."""
    ask(page, "Hello")
    wait_for_text(page, ".assistant .facts", "stopped at max tokens")
    app.state.model = "another"
    page.route("**/live", lambda route: route.abort())
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    wait_for_text(page, "#lost", "The server cannot be reached.")
    wait_for_text(page, "#health", "lost")
    page.unroute("**/live")
    wait_for_text(page, "#health", "serving")
    assert page.locator("#lost").is_hidden()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello again")
    assert sent.value.post_data_json["model"] == "another"


def test_one_of_several_replicas_is_chosen_and_all_tell_their_load(
    engine: ScriptedEngine, open_page: Callable[..., Any]
) -> None:
    engines = ScriptedReplicas(engine, ScriptedEngine(num_blocks=64, step_s=0.02))
    with serving(create_app(engines)) as url:
        page = open_page(url)
        chosen = "() => [...document.querySelectorAll('#replicas button')].map((each) => each.ariaPressed).join()"
        wait_for_text(page, "#replicas", "Replica 1")
        assert page.evaluate(chosen) == "true,false"
        wait_for_text(page, "#blocks-text", "of 320 in use")
        page.click("#load")
        for place in (1, 2):
            running = f"parseInt(document.querySelector('#replicas button:nth-child({place}) small').textContent) > 1"
            page.wait_for_function(f"() => {running}")
        picture(page, "replicas")
        overflow = "(each) => each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight + 1"
        assert not any(button.evaluate(overflow) for button in page.locator("#replicas button").all())
        page.click("#replicas button:nth-child(2)")
        wait_for_text(page, "#blocks-text", "of 64 in use")
        page.wait_for_function("() => document.querySelector('#n-running').textContent !== '–'")
        assert page.evaluate(chosen) == "false,true"
        assert len(engines.replicas[1].viewers) == 1
        page.click("#load-cancel")
        engines.replicas[1].health = Health(False, "it is being restarted")
        wait_for_text(page, "#lost", "Replica 1 is not available. it is being restarted")
        wait_for_text(page, "#replicas button:nth-child(2)", "it is being restarted")
        page.click("#replicas button:nth-child(1)")
        wait_for_text(page, "#health", "serving")
        wait_for_text(page, "#blocks-text", "of 320 in use")
        wait_until(page, lambda: engines.replicas[1].viewers == [])  # nobody looks there any more


def test_a_server_with_fewer_replicas_shows_its_first(engine: ScriptedEngine, open_page: Callable[..., Any]) -> None:
    engines = ScriptedReplicas(engine, ScriptedEngine(num_blocks=64))
    with serving(create_app(engines)) as url:
        page = open_page(url)
        page.click("#replicas button:nth-child(2)")
        wait_for_text(page, "#blocks-text", "of 64 in use")
        page.route("**/live?replica=1", lambda route: route.fulfill(status=404, json={"error": {"message": "gone"}}))
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        wait_for_text(page, "#blocks-text", "of 320 in use")
        assert page.locator("#lost").is_hidden()
