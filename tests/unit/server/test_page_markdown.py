"""Markdown on the page, in a real browser: what it looks like, that it is safe, and that it can grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import server
from tests.unit.server.browser import ask, picture, wait_for_text
from tests.unit.server.http_thread import serving
from tests.unit.server.scripted_engine import ScriptedEngine, create_app

MAX_RENDER_MS = 2000
SAMPLE = """\
# The title

A paragraph with **bold**, *italics*, ***both***, ~~old~~ text, `code` and a
second line. A [link](https://example.org/a_(b) "title"), and https://example.org/x.

## Steps

1. First, do
   this.
2. Then:
   - a nested point
   - another one
     1. deeper
3. Last:

   ```python
   def double(x):
       return 2 * x
   ```

> A quote with **bold** text,
> on two lines.
>
> - and a list

| Name | Count | Share |
|:-----|------:|:-----:|
| `a|b` | 12 | 50% |
| other | 3 | *none* |

---

```
no language
```

The end.
"""


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serving(create_app(ScriptedEngine(step_s=0.001))) as url:
        yield url


@pytest.fixture(scope="module")
def opened(browser: Any, base_url: str) -> Any:
    page = browser.new_page()
    page.add_init_script("window.hacked = (why) => (window.why = why);")
    page.goto(base_url)
    return page


@pytest.fixture
def page(opened: Any) -> Any:
    """The same for all, with an empty chat."""
    opened.click("#new-chat")
    return opened


def rendered(page: Any, *texts: str) -> str:
    """The HTML of an element that has shown these texts, one after the other."""
    return page.evaluate(
        """async (texts) => {
            const { MarkdownView } = await import("/web/markdown.js");
            const element = document.createElement("div");
            document.body.append(element);
            const view = new MarkdownView(element);
            for (const text of texts) view.show(text);
            const html = element.innerHTML;
            element.remove();
            return html;
        }""",
        texts,
    )


LINK = 'target="_blank" rel="noopener noreferrer"'
CASES = {
    "heading": ("# One\n###### Six ##\n#none", "<h3>One</h3><h6>Six</h6><p>#none</p>"),
    "emphasis": (
        "**b** *i* _i_ __b__ ***bi*** ~~s~~ a*b*c snake_case_name 2 * 3 * 4 **open",
        "<p><strong>b</strong> <em>i</em> <em>i</em> <strong>b</strong> <strong><em>bi</em></strong> <del>s</del> "
        "a<em>b</em>c snake_case_name 2 * 3 * 4 **open</p>",
    ),
    "nested emphasis": ("**a *b* `c`**", "<p><strong>a <em>b</em> <code>c</code></strong></p>"),
    "code": (
        "`a` ``b`c`` `open **x** \\*no\\*",
        "<p><code>a</code> <code>b`c</code> `open <strong>x</strong> *no*</p>",
    ),
    "breaks": ("one  \ntwo\\\nthree\nfour", "<p>one<br>two<br>three\nfour</p>"),
    "bullets": (
        "- a\n- b\n  - c\n\n    more\n* d",
        '<ul><li><p>a</p></li><li><p>b</p><ul class="loose"><li><p>c</p><p>more</p></li></ul></li>'
        "<li><p>d</p></li></ul>",
    ),
    "tight list": ("* a\n* b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    "loose list": ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
    "nested below a number": (
        "1. a\n  - b\n    - c\n2. d",
        "<ol><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul></li></ul></li><li><p>d</p></li></ol>",
    ),
    "ordered from": ("3. c\n4) d", '<ol start="3"><li><p>c</p></li><li><p>d</p></li></ol>'),
    "no list": ("In the year\n1986. A good one.", "<p>In the year\n1986. A good one.</p>"),
    "list after text": ("Items:\n- a", "<p>Items:</p><ul><li><p>a</p></li></ul>"),
    "lazy line": ("- a\nb\n\nc", "<ul><li><p>a\nb</p></li></ul><p>c</p>"),
    "quote": ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
    "rule": ("a\n\n---\n* * *\nb", "<p>a</p><hr><hr><p>b</p>"),
    "link": (
        '[a **b**](https://x.org "t") <https://y.org> [z](mailto:a@b.c)',
        f'<p><a href="https://x.org" title="https://x.org" {LINK}>a <strong>b</strong></a> '
        f'<a href="https://y.org" title="https://y.org" {LINK}>https://y.org</a> '
        f'<a href="mailto:a@b.c" title="mailto:a@b.c" {LINK}>z</a></p>',
    ),
    "bare link": (
        "(see https://x.org/a_(b)). **https://y.org**!",
        f'<p>(see <a href="https://x.org/a_(b)" title="https://x.org/a_(b)" {LINK}>https://x.org/a_(b)</a>). '
        f'<strong><a href="https://y.org" title="https://y.org" {LINK}>https://y.org</a></strong>!</p>',
    ),
    "brackets": ("a[0] [ ] [x](no) **[y]**", "<p>a[0] [ ] [x](no) <strong>[y]</strong></p>"),
    "table": (
        "| a | b |\n|---|--:|\n| `x|y` | 1 \\| 2 |\n| only |\nafter",
        '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th>a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td><code>x|y</code></td><td class="right">1 | 2</td></tr>'
        "<tr><td>only</td></tr></tbody></table></div><p>after</p>",
    ),
    "no table": ("a | b\nc | d", "<p>a | b\nc | d</p>"),
    "one line of ticks": ("```not a block```", "<p><code>not a block</code></p>"),
}


@pytest.mark.parametrize("name", CASES)
def test_markdown_is_shown_as_people_expect(page: Any, name: str) -> None:
    text, html = CASES[name]
    assert rendered(page, text) == html


def test_code_has_its_language_and_a_button_to_copy_it(page: Any) -> None:
    ask(page, "Repeat: Do:\n\n1. ```js\n   if (a < b) {\n     a();\n   }\n   ```\n\n~~~\n```\n**text**\n~~~")
    page.locator("#send").wait_for(state="visible")
    blocks = page.locator(".assistant .code")
    assert [blocks.nth(i).locator("code").text_content() for i in range(2)] == [
        "if (a < b) {\n  a();\n}",
        "```\n**text**",
    ]
    assert [blocks.nth(i).locator("span").text_content() for i in range(2)] == ["js", "code"]
    assert page.locator(".code button[aria-label='Copy this code']").count() == 2


def test_it_looks_like_a_document(page: Any, base_url: str, open_page: Callable[..., Any]) -> None:
    for each, name in ((page, "light"), (open_page(base_url, scheme="dark"), "dark")):
        ask(each, f"Repeat: {SAMPLE}")
        wait_for_text(each, ".assistant .body", "The end.")
        each.locator("#send").wait_for(state="visible")
        picture(each, f"markdown-{name}")
        sizes = each.evaluate("""() => ["h3", "h4", "p"].map((tag) =>
            parseFloat(getComputedStyle(document.querySelector(`.assistant .body ${tag}`)).fontSize))""")
        assert sizes[0] > sizes[1] > sizes[2]
        markers = each.evaluate("""() => ["ol", "ul"].map((tag) =>
            getComputedStyle(document.querySelector(`.assistant .body ${tag}`)).listStyleType)""")
        assert markers == ["decimal", "disc"]


def test_a_text_that_grows_ends_as_one_that_came_at_once(page: Any) -> None:
    texts = [SAMPLE, *(text for text, _ in CASES.values())]
    for text in texts:
        whole = rendered(page, text)
        assert rendered(page, *(text[:end] for end in range(1, len(text) + 1))) == whole
        assert rendered(page, "# Something else\n\nfirst\n\nlonger", text) == whole


def test_what_is_finished_is_not_touched_again(page: Any) -> None:
    touched = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("/web/markdown.js");
            const element = document.createElement("div");
            const view = new MarkdownView(element);
            view.show(text);
            const observer = new MutationObserver(() => {});
            observer.observe(element, { subtree: true, childList: true, characterData: true, attributes: true });
            for (const more of ["And", " it goes", " on.", "\\n\\nNew", " paragraph"]) view.show(text += more);
            const last = [...element.children].slice(-2);
            const isOld = ({ target }) => target !== element && !last.some((each) => each.contains(target));
            return observer.takeRecords().filter(isOld).length;
        }""",
        SAMPLE + "\n\n",
    )
    assert touched == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("```python\nprint(1)\npri", "<code>print(1)\npri</code>"),
        ("```python\nprint(1)\n``", "<code>print(1)</code>"),
        ("```", "<code></code>"),
        ("| a | b |\n|--", "<th>a</th><th>b</th>"),
        ("| a | b |\n|---|---|\n| 1", "<td>1</td>"),
        ("> quo", "<blockquote><p>quo</p></blockquote>"),
        ("1.", "<ol><li></li></ol>"),
    ],
)
def test_what_is_still_open_is_shown_sanely(page: Any, text: str, shown: str) -> None:
    assert shown in rendered(page, text)


HOSTILE = [
    "<script>hacked('script')</script>",
    "<img src=x onerror=\"hacked('onerror')\">",
    "[click](javascript:hacked('link'))",
    "[click](JaVaScRiPt:hacked('case'))",
    "[click](\x01javascript:hacked('control'))",
    "[click](java\tscript:hacked('tab'))",
    "[click](data:text/html,<script>hacked('data')</script>)",
    "<javascript:hacked('pointed')>",
    "![x](javascript:hacked('image'))",
    "![x](https://example.org/pixel.png)",
    "[a](https://x.org\" onmouseover=\"hacked('attribute'))",
    "```html onload=hacked('fence')\n<script>hacked('fenced')</script>\n```",
    '```"><img/src=x/onerror=hacked(1)>\nx\n```',
    "| <svg onload=hacked('cell')> |\n|---|\n| <b onclick=hacked('b')>b</b> |",
    "[a](https://x.org/%22%3E%3Cscript%3E)",
    "<a href='javascript:hacked(1)'>a</a>",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(page: Any, text: str) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    ask(page, f"Repeat: {text}")
    page.locator("#send").wait_for(state="visible")
    found = page.evaluate("""() => {
        const all = [...document.querySelectorAll(".assistant .body *")];
        for (const each of all) for (const kind of ["click", "mouseover", "load", "error"]) {
            if (each.localName !== "a") each.dispatchEvent(new Event(kind));
        }
        return {
            tags: all.map((each) => each.localName).filter((tag) => /^(script|img|svg|iframe|b|style)$/.test(tag)),
            handlers: all.flatMap((each) => each.getAttributeNames()).filter((name) => name.startsWith("on")),
            links: all.filter((each) => each.localName === "a").map((each) => [each.protocol, each.rel]),
            why: window.why,
        };
    }""")
    assert found["tags"] == [] and found["handlers"] == [] and found.get("why") is None
    assert all(
        link in (["https:", "noopener noreferrer"], ["mailto:", "noopener noreferrer"]) for link in found["links"]
    )
    assert not any("example.org" in url for url in requested), "nothing is fetched that a model names"


LONG = {
    "brackets": "[" * 100_000,
    "closed brackets": "[" * 50_000 + "]" * 50_000,
    "links without an end": "[a](b" * 20_000,
    "links in links": "[" * 10_000 + "a](https://x.org)" * 2_000,
    "images": "![" * 50_000,
    "stars": "*a " * 40_000,
    "closing stars": "a* " * 40_000,
    "nested stars": "*a **b " * 15_000 + "c** d* " * 15_000,
    "a run of stars": "*" * 100_000 + "a" + "*" * 100_000,
    "underscores": "_a" * 50_000,
    "tildes": "~~a " * 30_000,
    "ticks": "".join("`" * (i % 300 + 1) + " " for i in range(1_500)),
    "one tick each": "`a" * 20_001,
    "quotes": ">" * 100_000,
    "quoted lists": "> - " * 30_000,
    "bullets": "- " * 50_000,
    "nested lists": "\n".join("  " * (i % 100) + "- a" for i in range(2_000)),
    "blank lines": "- a\n" + "\n" * 100_000 + "b",
    "items and blank lines": "- a\n\n" * 5_000,
    "many columns": "|a" * 2_000 + "|\n" + "|-" * 2_000 + "|\n" + "|\n" * 5_000,
    "bars": "|" * 100_000,
    "almost a rule": "-" * 100_000 + "x",
    "dashes below bars": "a|b\n" + "-" * 100_000 + "x",
    "spaces": "a" + " " * 100_000 + "b",
    "spaces before a break": ("a" + " " * 300 + "\n") * 300,
    "hashes": "# " + "# " * 50_000,
    "a heading of spaces": "#" + " " * 100_000 + "x",
    "angles": "<https://" * 20_000,
    "parentheses": "https://x.org/" + ")" * 100_000,
    "addresses": "https://x.org/" * 10_000,
    "backslashes": "\\" * 100_000,
    "open fences": "```\n~~~\n" * 4_000,
    "titles": "[a](https://x.org " + '"a' * 30_000,
}


@pytest.mark.parametrize("name", LONG)
def test_no_text_takes_long_to_show(page: Any, name: str) -> None:
    """Also none that was made to: twice the text takes about twice the time."""
    took_ms, depth = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("/web/markdown.js");
            const element = document.createElement("div");
            const started = performance.now();
            const view = new MarkdownView(element);
            view.show(text.slice(0, text.length / 2));
            view.show(text);
            const depthOf = (node) => 1 + Math.max(0, ...[...node.children].slice(-50).map(depthOf));
            return [performance.now() - started, depthOf(element)];
        }""",
        LONG[name],
    )
    assert took_ms < MAX_RENDER_MS and depth < 100, (took_ms, depth)


def test_no_file_of_the_page_makes_html_from_text() -> None:
    files = [*(Path(server.__file__).parent / "web").glob("*.js")]
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(")
    assert files
    for path in files:
        text = path.read_text()
        assert not [word for word in forbidden if word in text], path.name
