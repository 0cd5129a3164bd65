"""The documentation speaks of what there is: every command has its page, every link leads somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import subprocess
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from documented import ELSEWHERE, NOT_RUN, PAGES, ROOT, is_run, python, shown
from tables import each

import async_rlhf
from async_rlhf.algorithms.table import BUILT_IN
from async_rlhf.cli import main
from async_rlhf.commands.table import COMMANDS, function_of, import_attribute
from async_rlhf.config.parsing import options_of
from async_rlhf.run.config import RunConfig

SHOWN = shown()
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_has_a_page_in_the_index():
    index = (ROOT / "docs" / "commands" / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert callable(function_of(name))
        page = ROOT / "docs" / "commands" / f"{name}.md"
        assert page.read_text(encoding="utf-8").startswith(f"# `{name}`"), name
        assert f"({name}.md)" in index, name
    pages = {path.stem for path in (ROOT / "docs" / "commands").glob("*.md")}
    assert pages == {*COMMANDS, "README"}


@each(PAGES)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


def test_the_site_is_built_so_that_warnings_end_it():
    """With --quiet no warning is counted, so --strict finds no anchor that leads nowhere."""
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_site_has_whole_docstrings_figures_that_follow_its_switch_and_a_notebook_to_read():
    pytest.importorskip("mkdocs")
    site = runpy.run_path(str(ROOT / "scripts" / "site.py"))
    names = "\n".join(site["names_page"]())
    for told in ("### OnlineTrainer.train\n", "Callable[[Any], Needs] = nothing,", "- `reward_funcs`: called as f("):
        assert told in names
    assert " at 0x" not in names
    page = SimpleNamespace(file=SimpleNamespace(src_uri="README.md"))
    links = site["on_page_markdown"]("[A](notebook.ipynb) ![b](figures/c.svg)", page, None, None)
    assert links == "[A](notebook.md) ![b](figures/c-light.svg#only-light)![b](figures/c-dark.svg#only-dark)"
    assert "def friendly(" in "".join(site["notebook_page"]((ROOT / "docs" / "notebook.ipynb").read_text("utf-8")))


@each([("README.md", 120), ("docs/architecture.md", 200)])
def test_first_pages_are_short(page, most):
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_options_in_the_examples_exist():
    """Every ``--key`` that follows ``async-rlhf COMMAND`` in a page is one of that command."""
    wrong = []
    for one in SHOWN:
        for command, rest in re.findall(r"(?:async-rlhf|async_rlhf[.]cli) (\w+) ([^`|;]*)", one.words):
            known = OPTIONS.get(command) or OPTIONS.setdefault(command, names_of(command))
            for option in re.findall(r"(?:^|(?<=\s))--([\w.-]+)", rest):
                a_shown_mistake = option == "trian.seed"
                is_free = option.split(".")[0] in ("models", "vllm", "grid") or a_shown_mistake
                if option not in known and not is_free:
                    wrong.append(f"{one.page}: async-rlhf {command} --{option}")
    assert not wrong


OPTIONS: dict[str, set[str]] = {"COMMAND": {"key", "config", "help-all"}}
SHORT = {"config", "dry", "resume", "resume-from", "reward", "help", "command", "output"}


def names_of(command: str) -> set[str]:
    """What its parser knows, of every algorithm: keys, groups, and short forms."""
    kind = import_attribute(COMMANDS[command].config)
    kinds = [RunConfig.of(algorithm) for algorithm in BUILT_IN] if kind is RunConfig else [kind]
    keys = {option.key for kind in kinds for option in options_of(kind)}
    groups = {key[:at] for key in keys for at, sign in enumerate(key) if sign == "."}
    of_files = {"train.loss_type"} if command == "train" else set()  # recipes/pairs/pairs.py
    return keys | groups | SHORT | of_files | {"env", "help-all", "dry-run"}


def test_what_commands_name_is_there():
    """Files of the repository, with the options of scripts; targets of make; extras."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for one in SHOWN:
        for file in re.findall(r"(?:^|[\s/'\"=])((?:recipes|benchmarks|scripts|tests)/[\w/.]+[.]\w+)", one.words):
            assert (ROOT / file).is_file() or file.endswith("/NAME.py"), one
        for file, rest in re.findall(r"^python ((?:recipes|benchmarks|scripts|tests)/\S+)([^;]*)", one.words):
            for option in re.findall(r"--[a-z]+", rest):
                known = file.endswith("/NAME.py") or option[2:] in (ROOT / file).read_text("utf-8")
                assert known, one
        for words in re.findall(r"\bmake ([a-z][\w -]*)", one.words):
            assert {word for word in words.split() if word.islower()} <= targets, one
        for names in re.findall(r"async-rlhf\[([\w,-]+)\]", one.words):
            assert set(names.split(",")) <= extras.keys(), one


def test_no_reason_is_named_for_what_no_page_has():
    """``make docs-check`` runs all the others; no reason and no test is named for what no page has."""
    told = [f"{one.page} {one.words}" for one in SHOWN if not one.inline]
    assert [part for part in (*ELSEWHERE, *NOT_RUN) if not any(part in line for line in told)] == []
    assert [file for file in ELSEWHERE.values() if not (ROOT / file).is_file()] == []


def dry_runs() -> dict[str, list[str]]:
    """The words of each command that nothing runs as it stands, with placeholders replaced."""
    found = {}
    for one in SHOWN:
        text = re.sub(
            r".*slurm/(?:one_node|several_nodes)[.]sh (\S+)(?: mnoukhov\S+)?",
            r"async-rlhf train --config \1",
            one.words,
        )
        words = re.search(r"(?:async-rlhf|async_rlhf[.]cli) (\w+ .*)", text)
        if words and not one.inline and not is_run(one) and one.page != "docs/faq.md" and "COMMAND" not in text:
            ranks = re.search(r"--nproc-per-node (\d)", text)
            more = f" --train.parallel.ranks {ranks[1]}" if ranks and " train " in text else ""
            text = re.sub(r'(?<=yml)"$', "", words[1]).partition(" | ")[0].replace(" ...", " --config run.yml")
            found[one.words] = [*shlex.split(re.sub(r"\bMODEL\b", "my-org/sft", text) + more), "--dry-run"]
    return found


DRY_RUNS = dry_runs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    (made / "recipes").symlink_to(ROOT / "recipes")
    run = {"model": "my-org/sft", "reward_model": "my-org/rm", "data": {"train": "rows.jsonl"}, "train": {"batches": 2}}
    (made / "run.yml").write_text(json.dumps(run))
    (made / "sft.yml").write_text(json.dumps({"train": "rows.jsonl", "output_dir": "runs/sft"}))
    (made / "sweep.yml").write_text(
        json.dumps({"base": run, "held_out": {"data": "rows.jsonl"}, "output_dir": "runs/sweep"})
    )
    return made


@pytest.mark.quick
@each(DRY_RUNS)
def test_a_command_that_is_not_run_is_read(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ASYNC_RLHF_API_KEY", "as the page has it exported")
    with pytest.raises(SystemExit) as ended:
        main(DRY_RUNS[words])
    assert ended.value.code == 0, capsys.readouterr().err


@each(python())
def test_python_on_the_pages_is_python_and_imports_what_there_is(name):
    for node in ast.walk(ast.parse(python()[name])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("async_rlhf"):
            module = import_module(node.module)
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []


def test_the_version_is_one():
    """The wheel takes the package's; what cites it names the same."""
    assert f"\nversion: {async_rlhf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_notebook_has_outputs_that_name_no_machine():
    text = (ROOT / "docs" / "notebook.ipynb").read_text("utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "python scripts/notebook.py"
    kinds = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", output)]
    assert {"image/png", "text/plain", "text"} <= set(kinds)
    assert "/tmp/" not in text
    assert "/home/" not in text
    assert len(text) < 200_000


@pytest.mark.parametrize("own", [None, "mine"])
def test_the_servers_of_several_nodes_start_with_a_key(own, monkeypatch, capsys):
    """The words with which the script starts them, and the key that it has exported by then."""
    script = (ROOT / "recipes/slurm/several_nodes.sh").read_text(encoding="utf-8")
    before = script.partition("\nsrun ")[0].replace("mapfile -t nodes < <(scontrol", "nodes=(a b c) # ")
    environment = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_NTASKS_PER_NODE": "8"}
    environment.pop("ASYNC_RLHF_API_KEY", None)
    environment |= {} if own is None else {"ASYNC_RLHF_API_KEY": own}
    words = ["bash", "-c", f"{before}\nprintenv ASYNC_RLHF_API_KEY", "job", "run.yml", "model"]
    key = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert key == own or (own is None and re.fullmatch("[0-9a-f]{64}", key))
    serve = re.search(r"async-rlhf (serve --host \S+)", script)[1].split()
    for known, code in ((key, 0), ("", 2)):
        monkeypatch.setenv("ASYNC_RLHF_API_KEY", known)
        with pytest.raises(SystemExit) as ended:
            main([*serve, "--model", "my-org/sft", "--dry-run"])
        assert (ended.value.code or 0) == code, capsys.readouterr().err
