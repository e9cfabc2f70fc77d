"""Web pages of other origins in a real browser: they can neither use the server nor read anything of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from headway.server.app import create_app
from headway.server.live.live_page import live_routes
from tests.unit.server.browser import chromium
from tests.unit.server.fake_engine import FakeServer
from tests.unit.server.http_thread import serving

REBOUND = "evil.example"
OWN_DEFENCES = "LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests,PrivateNetworkAccessSendPreflights"
"""What newer browsers do themselves against pages that reach for this machine."""
BODY = '{"prompt": "Hi", "max_tokens": 2}'
TRY = """async ([url, options]) => {
    try {
        const response = await fetch(url, options);
        return [response.type === "opaque" ? "opaque" : response.status, await response.text()];
    } catch (error) { return ["blocked", ""]; }
}"""
POST = {"method": "POST", "body": BODY}
AS_JSON = {**POST, "headers": {"content-type": "application/json"}}
WITHOUT_ASKING = {**POST, "mode": "no-cors", "headers": {"content-type": "text/plain"}}
"""What a browser sends to another origin without a preflight; the answer is hidden from the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    rebind = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
    with chromium(rebind, f"--disable-features={OWN_DEFENCES}") as launched:
        yield launched


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def other_site() -> Iterator[str]:
    """The address of a site that has nothing to do with the server."""

    async def home(_: Request) -> Response:
        return HTMLResponse("<title>another site</title>")

    with serving(Starlette(routes=[Route("/", home)])) as url:
        yield url


def with_page(server: FakeServer) -> Any:
    return create_app(server.services, [*live_routes(server.engine)])


def test_a_page_of_another_origin(page: Any, other_site: str) -> None:
    server = FakeServer()
    with serving(with_page(server)) as url:
        page.goto(other_site)
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            assert page.evaluate(TRY, [url + path, AS_JSON]) == ["blocked", ""]
            assert page.evaluate(TRY, [url + path, POST]) == ["blocked", ""]
            assert page.evaluate(TRY, [url + path, WITHOUT_ASKING]) == ["opaque", ""]
        for path in ("/v1/models", "/metrics", "/live", "/"):
            assert page.evaluate(TRY, [url + path, {}]) == ["blocked", ""]
        with page.expect_response(url + "/v1/completions") as answer:
            page.evaluate(
                """([url, body]) => {
                    const form = document.createElement("form");
                    form.method = "post"; form.enctype = "text/plain"; form.action = url;
                    const field = document.createElement("input");
                    field.name = body.slice(0, -1) + ', "user": "'; field.value = '"}';
                    form.append(field); document.body.append(form); form.submit();
                }""",
                [url + "/v1/completions", BODY],
            )
        assert answer.value.status == 403
    assert not server.engine.requests


def test_the_servers_own_page_and_those_that_are_allowed(page: Any, other_site: str) -> None:
    server = FakeServer(cors_origin=(other_site,))
    with serving(with_page(server)) as url:
        for address in (url, other_site):
            page.goto(address)
            status, text = page.evaluate(TRY, [url + "/v1/completions", AS_JSON])
            assert status == 200 and "Hello" in text
            assert page.evaluate(TRY, [url + "/v1/models", {}])[0] == 200
            assert page.evaluate(TRY, [url + "/v1/completions", POST])[0] == 415
    assert len(server.engine.requests) == 2


def test_a_name_that_was_made_to_point_to_this_machine(page: Any) -> None:
    """DNS rebinding: to the browser the page is of the server's own origin."""
    server = FakeServer()
    with serving(with_page(server)) as url:
        home = f"http://{REBOUND}:{urlsplit(url).port}"
        page.route(f"{home}/", lambda route: route.fulfill(body="<title>evil</title>", content_type="text/html"))
        page.goto(f"{home}/")
        for path, options in (("/v1/completions", AS_JSON), ("/v1/models", {}), ("/live", {}), ("/metrics", {})):
            status, text = page.evaluate(TRY, [home + path, options])
            assert status == 403 and "host_not_allowed" in text, path
    assert not server.engine.requests
