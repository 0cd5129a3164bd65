"""A translation in progress and how it is shown, and the keys that several of the original's programs share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from async_rlhf.compat.original.keys import ENVIRONMENT, EXPORTED, HERE, KEYS, MAPPED, THERE
from async_rlhf.config.base import Checked, fields_of, options_of, require

DEFAULT = "original's default"
ALGORITHM = "algorithm"
_WIDTH = 160
_SECRET = ("hub_token", "push_to_hub_token")


class Row(NamedTuple):
    """The translation of one key."""

    key: str
    """Of the original; in brackets for behaviour without a key."""
    value: Any
    """The value it had."""
    targets: Mapping[str, Any]
    """Our dotted keys and their values."""
    note: str
    """How they are related."""

    @property
    def shown(self) -> str:
        """The value, without anything that must not appear in a log."""
        if self.key in _SECRET:
            return "(not shown)"
        return ", ".join(map(str, self.value)) if self.key == ENVIRONMENT else spelt(self.value)

    @property
    def comment(self) -> str:
        """Key, value and note on one line, for otherwise a text could begin a line that is read as a key."""
        if self.note == MAPPED and self.targets:
            return self.key
        said = self.note if self.key.startswith("(") else f"{self.shown} ({self.note})"
        return _on_one_line(f"{self.key}: {said}")


@dataclass
class Translation:
    """A translation in progress.

    Args:
        command: ``train`` or another.
        kind: our configuration of that command (for ``train``: of the algorithm).
        values_of_file: keys of the original and their values, of the right types.
        overrides: our own dotted keys that were also given.
        values: our dotted keys and values so far.
        rows: the explanations so far.
        environment: variables to export.
    """

    command: str
    kind: type[Checked]
    values_of_file: Mapping[str, Any]
    overrides: Mapping[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """The value that the original would use for a key: as given, else its default."""
        return self.values_of_file.get(key, KEYS[self.command][key].default)

    def needed(self, key: str) -> Any:
        """The same, for a key that the original requires."""
        value = self[key]
        require(value not in (None, ""), key, value, f"must be given: the original's {self.command} needs it as well")
        return value

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of every dotted key of ours; ``dataclasses.MISSING`` where it must be given."""
        return {option.key: option.default for option in options_of(self.kind)}

    def maps(self, key: str, targets: Mapping[str, Any] | str, note: str = MAPPED) -> None:
        """Translate a key to some of ours. If it is absent, set those for which the original's default differs.

        Args:
            key: of the original.
            targets: our keys and their values; or one key, which has the same value.
            note: how they are related.
        """
        targets = {targets: self[key]} if isinstance(targets, str) else targets
        if key in self.values_of_file:
            self.values |= targets
            self.rows.append(Row(key, self.values_of_file[key], targets, note))
        else:
            self._differing(key, self[key], targets, DEFAULT if note == MAPPED else f"{DEFAULT}; {note}")

    def same(self, prefix: str, names: str) -> None:
        """Translate keys to one of ours each, with the same value: ``name``, or ``name=ours`` where ours differs."""
        for name in names.split():
            key, _, ours = name.partition("=")
            self.maps(key, prefix + (ours or key))

    def does(self, what: str, targets: Mapping[str, Any], note: str) -> None:
        """Record something that the original does without having a key for it."""
        self._differing(f"({what})", None, targets, note)

    def idle(self, note: str, *keys: str) -> None:
        """Record keys without effect that were given and are not explained yet."""
        done = {row.key for row in self.rows}
        self.rows += [
            Row(key, self.values_of_file[key], {}, note)
            for key in keys
            if key in self.values_of_file and key not in done
        ]

    def _differing(self, key: str, value: Any, targets: Mapping[str, Any], note: str) -> None:
        differing = {name: each for name, each in targets.items() if self.defaults[name] != each}
        self.values |= differing
        if differing:
            self.rows.append(Row(key, value, differing, note))

    def finish(self) -> None:
        """Explain the rest, and order the rows as in the file, then the defaults; every given key must have one."""
        for key in self.values_of_file.keys() - {row.key for row in self.rows}:
            note = KEYS[self.command][key].note
            if not note:
                raise AssertionError(f"no word about {key}")
            self.idle(note, key)
        order = {f"({ALGORITHM})": -1} | {key: number for number, key in enumerate(self.values_of_file)}
        self.rows.sort(key=lambda row: order.get(row.key, len(order)))


def spelt(value: Any) -> str:
    """A value as YAML, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf")).removesuffix("\n...\n").strip()
    return json.dumps(value) if "\n" in text else text  # YAML reads JSON's escapes


def print_table(t: Translation, source: str) -> None:
    """Print how every key was translated, to standard error."""
    table = Table(title=f"{source}: keys of the original, and what they are here", title_justify="left")
    for name in ("original", "value", f"async-rlhf {t.command}", "note"):
        table.add_column(name, overflow="fold", no_wrap=False)
    for row in t.rows:
        became = "\n".join(f"{name} = {spelt(value)}" for name, value in row.targets.items())
        table.add_row(row.key, "" if row.key.startswith("(") else row.shown, became, row.note)
    width = None if Console(file=sys.stderr).is_terminal else _WIDTH
    Console(file=sys.stderr, highlight=False, markup=False, width=width).print(table)


def as_yaml(t: Translation, source: str) -> str:
    """Our configuration file, with the origin of each value."""
    comments: dict[str, str] = {}
    for row in t.rows:
        for name in row.targets:
            same = row.note == MAPPED and name.rpartition(".")[2] == row.key
            comments[name] = "; ".join(filter(None, (comments.get(name), "" if same else row.comment)))
    # In the order of our configuration's fields, but the algorithm first and single keys before groups.
    fields = [ALGORITHM, *(item.name for item in fields_of(t.kind))]
    names = sorted(t.values, key=lambda name: (fields.index(name.partition(".")[0]), name.count(".")))
    lines = [
        f"# From {source}, a file of the original's format, by async-rlhf config migrate.",
        f"#   async-rlhf {t.command} --config THIS_FILE",
        *_lines({name: spelt(t.values[name]) + (comments[name] and f"  # {comments[name]}") for name in names}),
    ]
    lines += [f"# environment: export {name}={_on_one_line(value)}" for name, value in t.environment.items()]
    lines += [f"# {row.comment}" for row in t.rows if not row.targets]
    return "\n".join(lines) + "\n"


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _lines(texts: Mapping[str, str], indent: str = "") -> Iterator[str]:
    """Lines of YAML for dotted keys, one group below the other."""
    groups: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        group, _, rest = name.partition(".")
        groups.setdefault(group, {})[rest] = text
    for group, inner in groups.items():
        if "" in inner:
            yield f"{indent}{group}: {inner['']}"
        else:
            yield f"{indent}{group}:"
            yield from _lines(inner, f"{indent}  ")


def environment(t: Translation) -> None:
    """Translate the mapping whose entries are exported.

    Raises:
        ConfigError: a file may not set one of the variables, or a value is not on one line.
    """
    rule = f"a file may set only {', '.join(sorted(EXPORTED))}; export others in the shell, if you mean them"
    for name, value in t.values_of_file.get(ENVIRONMENT, {}).items():
        require(name in EXPORTED, ENVIRONMENT, name, rule)
        plain = isinstance(value, (str, int, float)) and str(value).isprintable()
        require(plain, f"{ENVIRONMENT}.{name}", value, "must be text on one line, or a number")
        t.environment[name] = str(value)
    t.idle("exported to the environment, but not by --dry-run", ENVIRONMENT)


def place(t: Translation, target: str, *, below_cwd: bool, names_run: bool) -> None:
    """Translate where results go, and the run's id at Weights & Biases.

    Args:
        t: the translation.
        target: our key of the output folder.
        below_cwd: whether this program of the original put the current folder's name below the parent.
        names_run: whether it made an id from wandb_run_id.
    """
    folder, parent, run_id = t.needed("output_dir"), t["output_global_parent_dir"], t["wandb_run_id"]
    named, job = run_id if names_run else None, os.environ.get("SLURM_JOB_ID")
    result = folder
    if named == "slurm":
        result = os.path.join(*filter(None, (parent, job, folder)))
        t.idle("part of output_dir", "output_global_parent_dir")
        note = "SLURM_JOB_ID is not set (the original fails then): the folder and the run have no number"
        if job:
            t.environment["WANDB_RUN_ID"] = f"{job}_{os.path.basename(folder)}"
            note = f"SLURM_JOB_ID is {job}: WANDB_RUN_ID={t.environment['WANDB_RUN_ID']}"
        t.idle(note, "wandb_run_id")
    elif below_cwd and parent:
        result = os.path.join(parent, os.path.basename(os.getcwd()), folder)
        t.idle("part of output_dir, with the name of the current folder, as there", "output_global_parent_dir")
    t.maps("output_dir", {target: result}, MAPPED if result == folder else "mapped, below its parent")
    if run_id == "snow":
        t.idle("a defect there: it gave every run the same id; ignored, each run has its own", "wandb_run_id")
    elif named not in (None, "slurm"):
        t.environment["WANDB_RUN_ID"] = named
        t.idle(f"exported as WANDB_RUN_ID={named}", "wandb_run_id")


def integrations(t: Translation, target: str) -> None:
    """Translate report_to: transformers 4.43 reports to everything that is installed unless told otherwise."""
    wanted, note, known = t["report_to"], MAPPED, ("tensorboard", "wandb")
    if t["sanity_check"]:
        wanted, note = [], "nothing in a sanity check"
    elif wanted in (None, ["all"]):
        wanted = [name for name in known if find_spec(name) is not None]
        note = f"whatever is installed of {', '.join(known)}"
    t.maps("report_to", {target: [] if wanted == ["none"] else wanted}, note)


def adapters(t: Translation, prefix: str, note: str = MAPPED) -> None:
    """peft's low-rank adapters, with a note on use_peft."""
    if not t["use_peft"]:
        t.maps("use_peft", {f"{prefix}.rank": 0})
        t.idle(f"{THERE}: use_peft is not true", "lora_r", "lora_alpha", "lora_target_modules")
        return
    wanted = t["lora_target_modules"]
    chosen = "; without lora_target_modules peft chose by architecture there, every linear layer here"
    t.maps("use_peft", {}, note + (chosen if wanted is None else ""))
    t.same(f"{prefix}.", "lora_r=rank lora_alpha=alpha")
    t.maps("lora_target_modules", {f"{prefix}.target_modules": [] if wanted in (None, ["all-linear"]) else wanted})
    t.idle(f"{HERE}: dropout is off", "lora_dropout")
    t.idle(f"{HERE}: only adapters are trained", "lora_modules_to_save")
    t.idle(f"{HERE}: it follows from the model", "lora_task_type")


def weights_dtype(t: Translation, target: str, note: str = MAPPED, narrow: Mapping[str, Any] | None = None) -> None:
    """The dtype of a model that is loaded but not trained.

    Args:
        t: the translation.
        target: our key of it.
        note: for another than float32.
        narrow: keys of ours to set with another than float32.
    """
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
    name = (t["torch_dtype"] or "auto").removeprefix("torch.")
    dtype = names.get(name, name)
    rule = "must be float32, bfloat16, float16 or auto"
    require(dtype in ("auto", "float32", "bfloat16", "float16"), "torch_dtype", t["torch_dtype"], rule)
    if dtype == "auto":
        t.idle(f"{HERE}: float32, for what the model's files say is not known before they are read", "torch_dtype")
    elif dtype == "float32":
        t.maps("torch_dtype", {target: dtype})
    else:
        t.maps("torch_dtype", {target: dtype, **(narrow or {})}, note)


def one_split(source: str) -> str:
    """An addition to a note on held-out data: a single file has no splits."""
    single = os.path.splitext(source)[1] in (".jsonl", ".json", ".csv", ".parquet")
    return "; a file has one split: held out is what is trained on" if single else ""


def one_of(key: str, value: Any, *options: str) -> Any:
    """The value, which must be one of those."""
    require(value in options, key, value, f"must be {' or '.join(map(repr, options))}")
    return value
