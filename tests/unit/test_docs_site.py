"""The docs as a site: each page has a place in the navigation, no link is broken, nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_docs import ROOT, load_script, run_examples

DOCS = ROOT / "docs"
hook = load_script(DOCS / "site_hook.py")
needs_mkdocs = pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material")


def places(entries: list[Any]) -> Iterator[str]:
    """The pages that a navigation names."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from places(value)
        else:
            yield value


def test_every_page_has_one_place_in_the_navigation() -> None:
    yaml = pytest.importorskip("yaml")
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    named = list(places(hook.expanded(navigation)))
    outside = [hook.ROOT / name.removeprefix("repository/") for name in named if name.startswith("repository/")]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    inside = [name for name in named if not name.startswith("repository/")]
    assert pages - set(inside) == set(), "these pages have no place in the navigation of mkdocs.yml"
    assert set(inside) - pages == set(), "mkdocs.yml names pages that do not exist"
    assert len(inside) == len(set(inside))
    assert outside and all(path.exists() for path in outside)


def test_all_pages_of_a_folder_take_one_entry() -> None:
    [decisions, results] = hook.expanded([{"Decisions": "decisions/*"}, {"Results": "results/*"}])
    assert decisions["Decisions"][0] == "decisions/README.md"
    assert "decisions/0001-one-scheduling-rule.md" in decisions["Decisions"]
    assert {"h200": hook.pages_of("results/h200")} in results["Results"]


def test_every_decision_is_listed_with_its_title() -> None:
    index = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    for path in (DOCS / "decisions").glob("0*.md"):
        number, _, title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").partition(". ")
        assert f"- [{number}: {title}]({path.name})" in index


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("docs/server.md", "server.md"),
        ("docs/decisions", "decisions/README.md"),
        ("docs/results", "repository/docs/results.md"),
        ("docs/results/cpu-quick/claims.json", "results/cpu-quick/claims.json"),
        ("README.md", "repository/README.md"),
        ("pyproject.toml", "repository/pyproject.toml.md"),
        ("src/headway/core", "repository/src/headway/core.md"),
    ],
)
def test_each_file_of_the_repository_has_one_name_on_the_site(path: str, name: str) -> None:
    assert hook.page_of(ROOT / path) == name


def test_links_in_blocks_of_code_are_left_alone() -> None:
    shown = "[a](one.md)\n\n```md\n[b](two.md)\n```\n\n[c](three.md#there) [d](https://example.org)\n"
    assert list(hook.links(shown)) == ["one.md", "three.md"]


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs-site` does. With `--quiet` MkDocs would not count warnings, and strict mode pass."""
    found = re.search(r"/mkdocs (build.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert found is not None
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        *found[1].split(),
        "--config-file",
        str(config),
        "--site-dir",
        str(folder),
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in strict mode, in which a broken link or anchor and a page without a place are errors."""
    folder = tmp_path_factory.mktemp("site")
    built = build(folder)
    assert built.returncode == 0, built.stderr
    return folder


@needs_mkdocs
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("[a](nope.md)", "contains a link 'nope.md'"),
        ("[a](#nope)", "no such anchor"),
        ("[a](other.md#nope)", "does not contain an anchor '#nope'"),
        ("[a](/server.md)", "absolute link '/server.md'"),
        ("[a](other.md)", ""),
    ],
)
def test_a_broken_link_is_an_error(tmp_path: Path, page: str, said: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "index.md").write_text(f"# A page\n\n{page}\n")
    (docs / "other.md").write_text("# Another\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: {docs}\nhooks: []\nnav: [index.md, other.md]\n")
    built = build(tmp_path / "site", config)
    assert built.returncode == (1 if said else 0), built.stderr
    assert said in built.stderr


LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^\s>]*")


@needs_mkdocs
def test_a_page_of_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not LOADED.findall(page.read_text(encoding="utf-8")), page.relative_to(site)


@needs_mkdocs
@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("deploying.html", "repository/deploy/docker/Dockerfile.html"),
        ("index.html", "tutorials/first_answer.html"),
        ("configuration.html", "repository/deploy/systemd.html"),
        ("repository/deploy/systemd.html", "systemd/headway.service.html"),
        ("repository/index.html", "../server.html"),
    ],
)
def test_links_out_of_docs_lead_to_pages_of_the_site(site: Path, page: str, link: str) -> None:
    assert f'href="{link}"' in (site / page).read_text(encoding="utf-8")
    assert ((site / page).parent / link).exists()


@needs_mkdocs
def test_the_search_knows_the_pages(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    assert '"location":"operating.html#out-of-memory"' in index


def test_pictures_are_small_and_used() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    for picture in (DOCS / "images").glob("*.[ps][nv]g"):
        assert picture.stat().st_size < 200_000, picture.name
        assert f"images/{picture.name})" in pages, picture.name


def test_a_here_document_is_one_command_of_an_example() -> None:
    block = "cat > a.toml <<'EOF'\nx = \"it's\"\n\n# a comment\nEOF\nheadway workload a.toml\n"
    assert run_examples.commands(block) == [
        (0, "cat > a.toml <<'EOF'\nx = \"it's\"\n\n# a comment\nEOF"),
        (5, "headway workload a.toml"),
    ]
