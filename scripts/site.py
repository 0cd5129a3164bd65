"""The documentation as a site: what mkdocs calls (mkdocs.yml names this file as its hook).

    mkdocs build --strict     # make site

Pages that lie outside docs/ come along, links between all of them are kept, and links to code become its name. Two
pages are made from the code: the keys of all commands, and the public names. A link or an anchor that leads nowhere, a
page that no menu has, and a search that does not find what it should, end the build.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import async_rlhf
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.config.base import spelt
from async_rlhf.config.parsing import options_of

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    path.relative_to(ROOT).as_posix(): f"more/{path.relative_to(ROOT).as_posix().lower().replace('/', '-')}"
    for path in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "RESULTS.md", *ROOT.glob("recipes/*/README.md")]
}
"""Pages outside docs/, and where they are in the site."""
FOUND = {
    "reference/keys/": "train.generation.vllm.gpu_memory_utilization",
    "reference/names/": "OnlineDPOTrainer",
    "architecture/": "staleness",
    "more/benchmarks-results/": "quickstart",
}
"""What the search has to find, and on which page."""
LINK = re.compile(
    r"(!?\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\])\((?!https?://|mailto:|#)(?P<path>[^)#\s]+)(?P<place>#[^)\s]*)?\)"
)
"""A link, or a picture, to a file."""


def keys_page() -> Iterator[str]:
    """Every key of every command, with its default and what it is for."""
    yield "# Keys of all commands"
    yield "Generated from the code, as `async-rlhf COMMAND --help-all` is. A key is an option, or in a YAML file."
    for name, command in COMMANDS.items():
        yield f"## {name}"
        yield f"{command.summary[0].upper()}{command.summary[1:]}."
        lines = []
        for option in options_of(import_attribute(command.config)):
            default = "must be given" if option.default is MISSING else f"`{option.default!r}`"
            text = " ".join(f"{option.text}{option.more}".split()).replace("|", "\\|")
            lines.append(f"- **`{option.key}`** ({spelt(option.hint)}; {default}). {text}")
        yield "\n".join(lines)


def names_page() -> Iterator[str]:
    """Every public name, with what it is."""
    yield "# Public names"
    yield "`from async_rlhf import ...`. [What is stable](../api.md) says how changes are announced."
    for name in async_rlhf.__all__[1:]:
        found = getattr(async_rlhf, name)
        yield f"## {name}"
        if "Config" not in name:  # keys are on the page of keys
            yield f"```python\n{name}{inspect.signature(found)}\n```"
        yield re.sub(r":\w+:`~?([^`]*)`", r"`\1`", inspect.getdoc(found) or "").replace("``", "`").split("\n\nArgs:")[0]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, and those from the code."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text("utf-8")))
    for place, lines in (("reference/keys.md", keys_page()), ("reference/names.md", names_page())):
        files.append(File.generated(config, place, content="\n\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site."""
    uri = page.file.src_uri
    own = next((path for path, place in OUTSIDE.items() if place == uri), f"docs/{uri}")

    def led(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(own), link["path"]))
        place = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is not None:
            return f"{link[1]}({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{link['place'] or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{own}: {link['path']} is not there")
        return link["text"]

    return LINK.sub(led, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Search as a reader would."""
    index: Any = json.loads((Path(config.site_dir) / "search" / "search_index.json").read_text("utf-8"))
    for page, word in FOUND.items():
        on_page = [entry["title"] + entry["text"] for entry in index["docs"] if entry["location"].startswith(page)]
        if not any(word in text for text in on_page):
            raise PluginError(f"the search does not find {word} on {page}")
