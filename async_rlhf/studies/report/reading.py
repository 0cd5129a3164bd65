"""What the folder of a run says, whatever state the run is in. Nothing is written, and nothing is required but a log.

A run may be training, have been killed while it wrote a line, have been resumed, or miss files. What cannot be read is
left out, and :attr:`ReadRun.problems` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from async_rlhf.commands.evaluation.tables import of_today
from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.config.yaml_text import read_yaml
from async_rlhf.run.callbacks import TRAINER_STATE
from async_rlhf.run.episodes import conversation
from async_rlhf.run.folder import DIGESTS, EVAL_SAMPLES, FINAL, METRICS, SAMPLES, refuse_second
from async_rlhf.run.record import ENVIRONMENT, RUN_FILE, Record, without_text_arguments
from async_rlhf.studies.report.charts import Series
from async_rlhf.system.files import from_json
from async_rlhf.system.lock import InUseError

_NAMED = 5
"""Names of values that are left out."""
State = Literal["running", "finished", "interrupted"]
EVALUATION = "evaluation.json"
FREE_FORM = ("generation.vllm.options", "ray.runtime_env", "parallel.deepspeed")
"""Groups of keys that are other programs'. They may hold secrets that we cannot recognise: the page leaves them out."""


class Span(NamedTuple):
    """Something that a process did.

    Args:
        track: which one did it.
        name: what.
        start: seconds from the first span of its file.
        end: the same.
        batch: 0 for none.
        why: of a fault, which has no length; empty for work.
        version: of the weights; 0 for none.
    """

    track: str
    name: str
    start: float
    end: float
    batch: int
    why: str = ""
    version: int = 0


class Evaluation(NamedTuple):
    """An evaluation.json and the samples.jsonl beside it.

    Args:
        folder: of both.
        config: what was asked for, with dotted keys.
        results: of :func:`~async_rlhf.commands.evaluate.run_evaluate`.
        samples: rows.
    """

    folder: Path
    config: Mapping[str, Any]
    results: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ReadRun:
    """A run's folder as it is now.

    Args:
        folder: of the run.
        name: unique on the page.
        config: dotted keys, those of training without a prefix, without secrets; empty without a run.yml.
        rows: of metrics.jsonl, those of training.
        evals: those of evaluations.
        samples: of samples.jsonl.
        eval_samples: of eval_samples.jsonl.
        digests: of digests.jsonl.
        starts: of environment.json.
        traces: spans of each trace, by file name, in the order of the starts. Faults are among them: generators
            that were started again or given up.
        state: how it ended, if it has.
        problems: what could not be read.
    """

    folder: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, float]] = ()
    evals: Sequence[Mapping[str, float]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    eval_samples: Sequence[Mapping[str, Any]] = ()
    digests: Sequence[Mapping[str, Any]] = ()
    starts: Sequence[Mapping[str, Any]] = ()
    traces: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    state: State = "finished"
    problems: Sequence[str] = ()

    @property
    def algorithm(self) -> str:
        """Its name; "" if it is not known."""
        return str(self.config.get("algorithm") or "")

    @property
    def staleness(self) -> int | None:
        """S as configured; None if it is not known."""
        staleness = self.config.get("staleness")
        return staleness if isinstance(staleness, int) else None

    @property
    def series(self) -> Series:
        """As charts show it."""
        return Series(self.name, self.algorithm, self.staleness)

    @property
    def batches(self) -> int:
        """Trained on, as far as they were logged."""
        return int(max((row["batch"] for row in self.rows), default=0))

    @property
    def planned(self) -> int | None:
        """Batches that it is to train on; None if that is not known."""
        if isinstance(batches := self.config.get("batches"), int):
            return batches
        episodes, last = self.config.get("total_episodes"), self.rows[-1] if self.rows else {}
        if self.config.get("num_train_epochs") is not None or not isinstance(episodes, int) or not last.get("episode"):
            return None
        return max(1, round(episodes * last["batch"] / last["episode"]))

    @property
    def progress(self) -> str:
        """Batches trained on, and planned if that is known, in words."""
        return f"{self.batches} of {self.planned}" if self.planned else str(self.batches)


def read_run(folder: Path, name: str, ended: bool = False) -> ReadRun:
    """Read the folder of a run.

    Args:
        folder: the output folder.
        name: how the page calls it.
        ended: the caller knows that nobody trains there any more.

    Raises:
        ConfigError: there is no metrics.jsonl.
    """
    rule = f"must be the output folder of a run or of evaluate, with {METRICS} or {EVALUATION} in it"
    require((folder / METRICS).is_file(), "runs", str(folder), rule)
    problems: list[str] = []
    metrics = list(json_lines(folder / METRICS, problems))
    lines = [row for row in metrics if "batch" in row]
    require(not metrics or bool(lines), "runs", str(folder), f"its {METRICS} is of another command than train")
    rows, evals = (
        [row for row in lines if any(key.startswith("eval_") for key in row) is held] for held in (False, True)
    )
    config = _config(folder, problems)
    samples, eval_samples = (list(json_lines(folder / file, problems, _SAMPLE)) for file in (SAMPLES, EVAL_SAMPLES))
    starts, traces = _starts(folder, problems), traces_of(folder)
    if not traces:
        problems.append("trace.json is missing: there is no timeline")
    digests = list(json_lines(folder / DIGESTS, problems, DIGEST))
    whole = (config, rows, evals, samples, eval_samples, digests, starts, traces)
    run = ReadRun(folder, name, *whole, problems=problems)
    return replace(run, state=_state(run, ended))


def read_evaluation(folder: Path) -> Evaluation | None:
    """An evaluation's folder; None if there is none, or it is not whole."""
    try:
        document = from_json((folder / EVALUATION).read_text(encoding="utf-8"))
        config, results = (
            fitted(document.get("config"), {"": _is_text}, []) or {},
            fitted(document["results"], _RESULTS, []),
        )
        results = of_today({"reference": "", "reference_response": None, **results})
        results["models"] = {
            name: {
                key: figure
                for key, figure in figures.items()
                if isinstance(figure, dict) == bool(_HAS_INTERVAL.search(key))
            }
            for name, figures in results["models"].items()
        }
        if not results["models"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Evaluation(folder, config, results, list(json_lines(folder / SAMPLES, [], _SAMPLE)))


def evaluations_of(runs: Sequence[ReadRun], folders: Sequence[Path] = ()) -> list[Evaluation]:
    """Those that were given, and those of these runs that lie in their folders or beside them."""
    asked = [folder.resolve() for folder in folders]
    nearby = [folder for run in runs for folder in (run.folder, run.folder.resolve().parent)]
    near = [path.parent.resolve() for folder in nearby for path in sorted(folder.glob(f"*/{EVALUATION}"))]
    evaluations = {folder: read_evaluation(folder) for folder in [*asked, *near]}
    return [
        evaluation
        for folder, evaluation in evaluations.items()
        if evaluation is not None and (folder in asked or of_runs(evaluation, runs))
    ]


def of_runs(evaluation: Evaluation, runs: Sequence[ReadRun]) -> dict[str, str]:
    """Model of an evaluation -> the run that it is of."""
    names, whole = {}, evaluation.config.get("run")
    for model in evaluation.results["models"]:
        path = evaluation.config.get(f"models.{model}") or (None if whole is None else f"{whole}/{model}")
        for run in runs:
            if path is not None and Path(path).absolute().is_relative_to(run.folder.absolute()):
                names[model] = run.name
    return names


def _is_there(value: Any) -> bool:
    return value is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_figure(value: Any) -> bool:
    """Whether it is a number, or one with its interval."""
    ends = [value.get(name) for name in ("low", "estimate", "high")] if isinstance(value, dict) else [value]
    return all(map(_is_number, ends))


def _is_conversation(value: Any) -> bool:
    try:
        return bool(conversation(value, ()))
    except (LookupError, TypeError, AttributeError, ValueError):
        return False


Shape = Mapping[str, Any] | Callable[[Any], bool]
"""What a value must be; of a mapping each value, "" for those of all other keys."""
_METRICS: Shape = {"": _is_number}
DIGEST: Shape = {"": _is_text, "batch": _is_number, "drawn": {"": _is_number}, "tensors": {"": _is_text}}
_SAMPLE: Shape = {
    **dict.fromkeys(("batch", "score", "reference_score"), _is_number),
    **dict.fromkeys(("row", "sample", "query"), _is_plain),
    **{"messages": _is_conversation, "metrics": {"": _is_plain}},
    **{"rewards": lambda value: _is_list(value) and all(reward is None or _is_number(reward) for reward in value)},
    "models": {"": {"score": _is_number}},
}
_START: Shape = {"async_rlhf": {}, "packages": {}, "command": _is_list}
_FIGURES: Shape = {"": _is_figure}
_RESULTS: Shape = {
    **{"reference": _is_plain, "prompts": _is_plain, "notes": _is_list, "reward": _is_text},
    **{"reference_response": _FIGURES, "models": {"": _FIGURES}},
}
_HAS_INTERVAL = re.compile("^reward_|win_rate|kl_to")


def fitted(value: Any, shape: Shape, lost: list[str], name: str = "") -> Any:
    """A value without the parts that have not their shape, whose names ``lost`` gets; null has any, and is left out."""
    fits = isinstance(value, dict) if isinstance(shape, Mapping) else shape(value)
    if not fits:
        lost += [name] if value is not None else []
        return None
    if not isinstance(shape, Mapping) or not shape:
        return value
    parts = {key: fitted(part, shape.get(key, shape.get("", _is_there)), lost, key) for key, part in value.items()}
    return {key: part for key, part in parts.items() if part is not None}


def json_lines(path: Path, problems: list[str], shape: Shape = _METRICS) -> Iterator[dict[str, Any]]:
    """The objects of a file that may still be written; ``problems`` gets what is left out of them."""
    if not path.is_file():
        return
    broken = 0
    lost: list[str] = []
    not_finite: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        # A line without an end is still being written, or its writer was killed.
        for line in takewhile(lambda line: line.endswith("\n"), file):
            try:
                row = from_json(line, parse_constant=not_finite.append)  # which gives None for NaN and Infinity
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield fitted(row, shape, lost)
            else:
                broken += 1
    if broken:
        problems.append(f"{path.name}: {broken} lines are not JSON objects and are left out")
    if not_finite:
        problems.append(f"{path.name}: {len(not_finite)} values are NaN or infinite and are left out")
    problems += _of_wrong_types(path, lost)


def _of_wrong_types(path: Path, lost: Sequence[str]) -> list[str]:
    names = ", ".join(sorted({*lost})[:_NAMED])
    message = f"{path.name}: {len(lost)} values are of another type than a run writes and are left out ({names})"
    return [message] if lost else []


def _config(folder: Path, problems: list[str]) -> dict[str, Any]:
    path = folder / RUN_FILE
    with _noting(path, "algorithm and sizes are not known", problems):
        values = read_yaml(str(path), "runs")
        flat = Record(values).flat()
        for name in ("reward_funcs", "callbacks"):
            flat[name] = [without_text_arguments(str(function)) for function in values.get(name) or []]
        groups = tuple(f"{group}." for group in FREE_FORM)
        return {key: value for key, value in flat.items() if not f"{key}.".startswith(groups)}
    return {}


def _starts(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    path = folder / ENVIRONMENT
    with _noting(path, "versions and starts are not known", problems):
        lost: list[str] = []
        starts = [fitted(start, _START, lost, "start") for start in from_json(path.read_text(encoding="utf-8"))]
        problems += _of_wrong_types(path, lost)
        return [start for start in starts if start is not None]
    return []


@contextmanager
def _noting(path: Path, missing: str, problems: list[str]) -> Iterator[None]:
    """Adds to ``problems`` what goes wrong with a file; ``missing`` is what follows if it is not there."""
    try:
        yield
    except (ConfigError, OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        problems.append(f"{path.name} {f'cannot be read: {error}' if path.is_file() else f'is missing: {missing}'}")


def _state(run: ReadRun, ended: bool) -> State:
    try:
        if not ended:
            refuse_second(run.folder)
    except InUseError:
        return "running"
    try:
        saved = from_json((run.folder / FINAL / TRAINER_STATE).read_text(encoding="utf-8"))
        whole = saved["global_step"] >= run.batches
    except (OSError, ValueError, KeyError, TypeError):
        whole = (run.folder / FINAL).is_dir()
    return "finished" if whole else "interrupted"


def traces_of(folder: Path) -> dict[str, list[Span]]:
    """The spans of each trace of a run, by file name, in the order of its starts."""
    later = [path for path in folder.glob("trace-from-*.json") if path.stem.rpartition("-")[2].isdigit()]
    files = [folder / "trace.json", *sorted(later, key=lambda path: int(path.stem.rpartition("-")[2]))]
    return {path.name: spans for path in files if path.is_file() and (spans := list(_spans(path)))}


def _spans(path: Path) -> Iterator[Span]:
    """The whole spans of a trace, which is cut off if the run was killed."""
    tracks: dict[Any, str] = {}
    first: float | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = from_json(line.rstrip().rstrip(","))
                kind, details = event["ph"], event.get("args", {})
                if kind == "M":
                    tracks[event["tid"]] = str(details["name"])
                why = str(details.get("why", "")) if kind == "i" else ""
                if kind != "X" and not why:
                    continue
                start, seconds = event["ts"] / 1e6, event["dur"] / 1e6 if kind == "X" else 0.0
                version = int(details.get("version", 0))
                track, batch = tracks.get(event["tid"], ""), int(details.get("batch", 0))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue
            first = start if first is None else first
            yield Span(track, str(event["name"]), start - first, start - first + seconds, max(batch, 0), why, version)
