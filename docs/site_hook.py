"""What MkDocs does not do by itself when it builds the site from the pages of docs/ (`make docs-site`).

The pages are written for a code host, where a link such as `../src/headway/config.py` or `../benchmarks/RESULTS.md`
leads to another folder of the repository. A site has only docs/. So each file that a page links to becomes a page of
the site, below `repository/`: Markdown as it is, other text as a block of code, a folder as the list of its files.
Nothing is copied in the repository, and the site needs no code host.

Headings get the anchors that a code host gives them, and `folder/*` in the navigation is every page of that folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that tests can read the navigation where MkDocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.S | re.M)
LANGUAGES = {".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".py": "python", ".sh": "sh"}
PAGES_OF_THE_NAVIGATION = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside of docs/ that are part of the site though no page may link to them."""
FOUND_LAST = ("results/", "repository/")
"""What the search shows after all other pages."""


# ---------------------------------------------------------------------------------------------------- navigation


def expanded(entries: list[Any]) -> list[Any]:
    """The navigation, with the pages of a folder for `folder/*`."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            [(title, value)] = entry.items()
            if isinstance(value, list):
                found.append({title: expanded(value)})
            elif value.endswith("/*"):
                found.append({title: pages_of(value.removesuffix("/*"))})
            else:
                found.append(entry)
        else:
            found.append(entry)
    return found


def pages_of(folder: str) -> list[Any]:
    """All pages of a folder of docs/, its README first; pages of its folders below their names."""
    pages: list[Any] = []
    for path in sorted((DOCS / folder).iterdir(), key=lambda path: (path.name != "README.md", path.is_dir(), path)):
        name = path.relative_to(DOCS).as_posix()
        if path.is_dir() and any(path.rglob("*.md")):
            pages.append({path.name: pages_of(name)})
        elif path.suffix == ".md":
            pages.append(name)
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    from pymdownx.slugs import slugify

    config.nav = expanded(config.nav or [])
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


# -------------------------------------------------------------------------------------------- links out of docs/


def links(markdown: str) -> Iterator[str]:
    """The files that a page links to, as it writes them; those in blocks of code do not count."""
    for target, _ in LINK.findall(FENCE.sub("", markdown)):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def page_of(path: Path) -> str:
    """The name that a file of the repository has on the site."""
    if path.is_dir() and (path / "README.md").exists():
        path = path / "README.md"
    if is_on_the_site(path):
        return path.relative_to(DOCS).as_posix()
    name = (Path("repository") / path.relative_to(ROOT)).as_posix()
    return name if path.suffix == ".md" else f"{name}.md"


def linked_from(pages: list[Path]) -> set[Path]:
    """Files and folders that these pages, and the Markdown that they link to, need beside the pages of docs/."""
    outside: set[Path] = set()
    while pages:
        page = pages.pop()
        for target in links(page.read_text(encoding="utf-8")):
            path = (page.parent / target).resolve()
            is_there = path.exists() and path.is_relative_to(ROOT)
            if not is_there or path in outside or is_on_the_site(path):
                continue  # MkDocs itself warns of what does not exist
            outside.add(path)
            if path.suffix == ".md":
                pages.append(path)
            elif path.is_dir():
                outside.update(one for one in files_of(path) if not is_on_the_site(one))
    return outside


def is_on_the_site(path: Path) -> bool:
    """Whether MkDocs takes a file from docs/ by itself; of a folder, whether its README does for it."""
    return path.is_relative_to(DOCS) and (path.suffix not in ("", ".py") or (path / "README.md").exists())


def files_of(folder: Path) -> list[Path]:
    """The text files of a folder, its folders' as well."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and is_text(path)
    ]


def is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def content_of(path: Path) -> str:
    """A page that shows a file as code, or lists a folder."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = [one.relative_to(path).as_posix() for one in files_of(path)]
        return f"# {name}\n\n" + "".join(f"* [{file}]({path.name}/{file})\n" for file in files)
    text = path.read_text(encoding="utf-8").rstrip()
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"# {name}\n\n{fence} {LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File, InclusionLevel

    named = [ROOT / name for name in PAGES_OF_THE_NAVIGATION]
    own = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for path in sorted({*named, *linked_from([*own, *named])}):
        name = page_of(path)
        if path.suffix == ".md":
            page = File.generated(config, name, abs_src_path=str(path))
        else:
            page = File.generated(config, name, content=content_of(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site. A page is found where it lies in the repository."""
    name = page.file.src_uri
    if name.startswith(FOUND_LAST):
        page.meta["search"] = {"boost": 0.2}
    is_outside = name.startswith("repository/")
    place = ROOT / name.removeprefix("repository/") if is_outside else DOCS / name

    def on_the_site(found: re.Match[str]) -> str:
        path = (place.parent / found[1]).resolve()
        if "://" in found[1] or not path.exists() or not path.is_relative_to(ROOT):
            return found[0]
        return os.path.relpath(page_of(path), os.path.dirname(name) or ".") + found[2]

    kept = [fence[0] for fence in FENCE.finditer(markdown)]
    text = FENCE.split(markdown)[::3]
    return "".join(LINK.sub(on_the_site, part) + code for part, code in zip(text, [*kept, ""]))
