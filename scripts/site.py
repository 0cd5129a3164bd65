"""The documentation as a site: what mkdocs calls (mkdocs.yml names this file as its hook).

    mkdocs build --strict     # make site

Pages that lie outside docs/ and the notebook come along, links between all of them are kept, and links to code become
its name. Two pages are made from the code: the keys of all commands, and the public names. Commands are coloured, and
names break at their points and underscores. Figures follow the switch between light and dark. A link or an anchor that
leads nowhere, a page that no menu has, and a search that does not find what it should, end the build.
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
from pygments.lexers.shell import BashLexer
from pygments.token import Name

import async_rlhf
from async_rlhf.commands.table import COMMANDS, import_attribute
from async_rlhf.config.base import options_of, spelt, texts_of

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    path.relative_to(ROOT).as_posix(): f"more/{path.relative_to(ROOT).as_posix().lower().replace('/', '-')}"
    for path in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "RESULTS.md", *ROOT.glob("recipes/*/README.md")]
} | {"docs/notebook.ipynb": "notebook.md"}
"""Pages outside docs/, and a notebook inside, and where they are in the site."""
SCHEMES = {"light": "not all", "dark": "all"}
"""Each scheme, and where its copy of a figure is dark: a figure in Safari asks the system, not the page's switch."""
FOUND = {
    "reference/keys/": "train.generation.vllm.gpu_memory_utilization",
    "reference/names/": "OnlineTrainer.train",
    "notebook/": "OnlineDPOTrainer",
    "architecture/": "staleness",
    "more/benchmarks-results/": "quickstart",
}
"""What the search has to find, and on which page."""
LINK = re.compile(
    r"(!?\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\])\((?!https?://|mailto:|#)(?P<path>[^)#\s]+)(?P<place>#[^)\s]*)?\)"
)
"""A link, or a picture, to a file."""

SHORT = 24
"""Letters of code up to which it stays on one line."""
BLOCK = re.compile(r"^```.*?^```$|(?<=\n\n)(?P<code>(?: {4}[^\n]*\n|\n(?= {4}))+)", re.MULTILINE | re.DOTALL)
"""A fenced block, or one that is set off by spaces."""
COMMAND = re.compile(r"(?:\$|async-rlhf|torchrun|accelerate|sbatch|python|make|pip|curl|ray|head|grep|export) ")
BashLexer.tokens["basic"][:0] = [
    (r"(?<=\s)--?[a-zA-Z][\w.-]*", Name.Attribute),
    (r"(?m)^(?:async-rlhf|python|pip|make|torchrun)\b", Name.Function),
]


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


def signature(name: str, found: Any) -> str:
    """How it is called: types without quotes, functions by their names, and a line for each of many parameters."""
    told = re.sub(r"<function (\S+) at 0x\w+>", r"\1", str(inspect.signature(found)))
    told = re.sub(r"(: |-> )(['\"])(.*?)\2", r"\1\3", told).replace("(self)", "()").replace("(self, ", "(")
    told = told.removesuffix(" -> None") if inspect.isclass(found) else told
    if len(name + told) > 100:
        parameters, end = told.rsplit(")", 1)
        told = re.sub(r", (?=\*|\w+: )", ",\n    ", parameters.replace("(", "(\n    ", 1)) + f",\n){end}"
    return f"```python\n{name}{told}\n```"


def readable(docstring: str) -> str:
    """A docstring as Markdown: arguments and errors are lists."""
    told = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", inspect.cleandoc(docstring)).replace("``", "`")
    told = re.sub(r"^    (?! )(?:(\w+): )?", lambda line: f"- `{line[1]}`: " if line[1] else "", told, flags=re.M)
    return re.sub(r"^(Args|Returns|Raises):$", r"**\1**\n", told, flags=re.M)


def names_page() -> Iterator[str]:
    """Every public name, with what it is, its fields, properties and methods."""
    yield "# Public names"
    yield "`from async_rlhf import ...`. [What is stable](../api.md) says how changes are announced."
    for name in async_rlhf.__all__[1:]:
        found = getattr(async_rlhf, name)
        yield f"## {name}"
        is_config = "Config" in name
        if is_config:
            yield "Its keys are on [the page of keys](keys.md)."
        elif found.__init__.__qualname__ == f"{name}.__init__":
            yield signature(name, found)
        yield readable(found.__doc__)
        base = next((base.__name__ for base in found.__mro__[1:] if base.__name__ in async_rlhf.__all__), None)
        if base:
            yield f"It has all that [{base}](#{base.lower()}) has."
        own = {member: value for member, value in vars(found).items() if not member.startswith("_")}
        texts = {} if is_config or base else {field: text for field, text in texts_of(found).items() if field in own}
        texts |= {one: value.__doc__ for one, value in own.items() if isinstance(value, property) and value.__doc__}
        if texts:
            yield "**Attributes**"
            yield "\n".join(f"- `{member}`: {' '.join(readable(text).split())}" for member, text in texts.items())
        for member, value in own.items():
            if inspect.isfunction(value) and value.__doc__:  # one without it does what its base says
                yield f"### {name}.{member}"
                yield signature(member, value)
                yield readable(value.__doc__)


def notebook_page(notebook: str) -> Iterator[str]:
    """A notebook's cells with what they printed and drew, and where to get it."""
    for number, cell in enumerate(json.loads(notebook)["cells"]):
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text")})
            if "image/png" in data:
                yield f'<img alt="What the cell draws" src="data:image/png;base64,{data["image/png"]}">'
            else:
                yield f"```text\n{''.join(data['text/plain']).rstrip()}\n```"
        if number == 0:
            yield 'To run it: <a href="../notebook.ipynb" download>the notebook</a>.'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/, the notebook, and those from the code."""
    for path, place in OUTSIDE.items():
        text = (ROOT / path).read_text("utf-8")
        is_page = path.endswith(".md")
        files.append(File.generated(config, place, content=text if is_page else "\n\n".join(notebook_page(text))))
    for figure in (ROOT / "docs" / "figures").iterdir():
        for scheme, media in SCHEMES.items():
            drawing = figure.read_text("utf-8").replace("(prefers-color-scheme:dark)", media)
            files.append(File.generated(config, f"figures/{figure.stem}-{scheme}.svg", content=drawing))
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
            target = posixpath.relpath(place, posixpath.dirname(uri) or ".")
            if target.endswith(".svg"):
                return "".join(f"{link[1]}({target[:-4]}-{scheme}.svg#only-{scheme})" for scheme in SCHEMES)
            return f"{link[1]}({target}{link['place'] or ''})"
        if not (ROOT / path).exists():
            raise PluginError(f"{own}: {link['path']} is not there")
        return link["text"]

    def coloured(block: re.Match[str]) -> str:
        code = re.sub("^ {4}", "", block["code"] or "", flags=re.M)
        found = COMMAND.match(code)
        language = "console" if found and found[0] == "$ " else "bash"
        return f"```{language}\n{code}```\n" if found else block[0]

    return BLOCK.sub(coloured, LINK.sub(led, markdown))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Let short code stay on one line, and names go on after a point or underscore; the search has read them whole."""

    def lined(code: re.Match[str]) -> str:
        if len(code[1] or "") > SHORT:
            return f"<code>{re.sub(r'(?<=[a-z0-9][._/=])(?=[a-z])', '<wbr>', code[1])}</code>"
        return f'<code class="short">{code[1]}</code>' if code[1] else code[0]

    return re.sub(r"<pre.*?</pre>|<code>([^<]*)</code>", lined, output, flags=re.DOTALL)


def on_post_build(config: MkDocsConfig) -> None:
    """Search as a reader would."""
    index: Any = json.loads((Path(config.site_dir) / "search" / "search_index.json").read_text("utf-8"))
    for page, word in FOUND.items():
        on_page = [entry["title"] + entry["text"] for entry in index["docs"] if entry["location"].startswith(page)]
        if not any(word.lower() in text.lower() for text in on_page):
            raise PluginError(f"the search does not find {word} on {page}")
