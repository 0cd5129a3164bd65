"""The command line: parse, dispatch, and turn errors into one clear line and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import async_rlhf
from async_rlhf.commands.table import COMMANDS, ORIGINAL, function_of, import_attribute
from async_rlhf.config import ConfigError
from async_rlhf.config.base import Checked
from async_rlhf.config.parallel import launched_rank
from async_rlhf.config.parsing import parse, take_config_file
from async_rlhf.config.spelling import meant
from async_rlhf.system.errors import DiffersError, NothingLearntError, UserCodeError, frames_of, last_place
from async_rlhf.system.names import check_names
from async_rlhf.system.signals import RankError, ending_signals

_SPEAKING_SECONDS = 30.0
_FIRST = {**dict.fromkeys(("explain", "workers"), "run"), "recipes": "name", "config": "file"}
_FIRST |= {"sweep": "config", "certify": "config"}
"""The option that a command's first word is for."""


def usage() -> str:
    """The help of the program itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: async-rlhf COMMAND [--config FILE.yml] [--key value ...]",
            "",
            "Asynchronous RLHF: sample and train at the same time, with exact staleness.",
            "",
            "commands:",
            *lines,
            "",
            "async-rlhf COMMAND --help shows the options of a command that matter most, --help-all shows all of them; "
            "--dry-run prints its resolved configuration.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 failed, 2 wrong usage or configuration, 3 trained without learning anything,
    130 interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0 if words else 2)
    if words[0] == "--version":
        print(f"async-rlhf {async_rlhf.__version__}")
        sys.exit(0)
    if words[0] not in COMMANDS:
        rule = f"must be one of {', '.join(COMMANDS)}{meant(words[0], COMMANDS, '')}"
        print(f"async-rlhf: got {words[0]!r}; {rule}", file=sys.stderr)
        sys.exit(2)
    sys.exit(_run(words[0], words[1:]))


def _run(name: str, words: list[str]) -> int:
    # By default OpenMP's idle threads spin for long; on a busy machine every small operation then waits for a time
    # slice, which was seen to be 20 times slower. Spinning briefly costs nothing. torch reads this once, when it is
    # loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    lead = launched_rank() == 0  # speaks for all ranks
    logging.basicConfig(level=logging.INFO if lead else logging.WARNING, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpx2", "datasets", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for number in ending_signals():
        signal.signal(number, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may have set it to be ignored
        signal.signal(signal.SIGINT, _interrupt)
    try:
        dry_run = "--dry-run" in words
        words = [word for word in _spelt_out(name, words) if word != "--dry-run"]
        kind = import_attribute(COMMANDS[name].config)
        has_file = take_config_file(words)[0] is not None  # which may be the original's
        parse_words = import_attribute(ORIGINAL) if has_file else parse
        config, text = parse_words(kind, name, words, export=not dry_run)
        if dry_run:
            print(text + _derived(config))
            return 0
        check_names((config, ""))
        outcome = function_of(name)(config)
        if isinstance(outcome, dict) and "nothing_learnt" in outcome:
            raise NothingLearntError(outcome["nothing_learnt"])
    except KeyboardInterrupt as error:
        if lead:
            print(f"async-rlhf {name}: interrupted{f': {error}' if error.args else ''}", file=sys.stderr)
        return 130
    except ConfigError as error:
        if lead or os.environ.get("LOCAL_RANK") == "0":  # an error may concern one host only
            print(f"async-rlhf {name}: error: {error}", file=sys.stderr)
        else:  # the launcher ends all ranks as soon as one has ended, and the one that speaks may be slower
            time.sleep(_SPEAKING_SECONDS)
        return 2
    except RankError as error:
        if lead or (launched_rank() == 1 and str(error).startswith("rank 0 ")):
            print(f"async-rlhf {name}: error: {error}", file=sys.stderr)
        return 1
    except NothingLearntError as error:
        if lead:
            _tell(name, str(error))
        return 3
    except (UserCodeError, DiffersError) as error:
        _tell(name, str(error), getattr(error, "frames", ""))
        return 1
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what_to_do = "; make room and start again: what was saved before is whole" if full else ""
        _tell(name, f"{type(error).__name__}: {error}{what_to_do}")
        return 1
    except Exception as error:  # of any kind: of the user's own code, such as an engine or a callback
        if not (frames := frames_of(error)):
            raise
        _tell(name, f"{type(error).__name__}: {error}{last_place(frames)}", frames)
        return 1
    return 0


def _tell(name: str, message: str, frames: str = "") -> None:
    """Say what went wrong, below the frames of the user's own code."""
    if frames:
        print(f"in code of your own, most recent call last:\n{frames}", end="", file=sys.stderr)
    print(f"async-rlhf {name}: error: {' '.join(message.split())}", file=sys.stderr)


def _spelt_out(name: str, words: list[str]) -> list[str]:
    """Short forms as options: ``explain RUN`` as ``--run RUN``, ``workers RUN N`` too,
    ``report A B`` and ``diff A B`` as ``--runs A --runs B``, ``sweep FILE`` as ``--config FILE``, ``recipes NAME`` as
    ``--name NAME``, ``config migrate FILE`` as ``--file FILE``, ``train --resume`` as ``--train.resume=true``,
    ``sft --resume`` as ``--resume=true``, and ``--reward F`` as ``--reward_funcs F``."""
    if name == "config" and words[:1] == ["migrate"]:
        words = words[1:]
    elif name == "config" and words not in (["-h"], ["--help"], ["--help-all"]):
        raise ConfigError(f"got {' '.join(words[:1])!r}; must be: async-rlhf config migrate FILE")
    if name == "explain":  # --sample 21/3
        whole = re.sub(r"(^|\n)--sample[=\n](\w+)/(\w+)(?=\n|$)", r"\1--batch=\2\n--sample=\3", "\n".join(words))
        words = whole.split("\n") if words else []
    if name in _FIRST and words and not words[0].startswith("-"):
        count = ["--workers"] if name == "workers" and words[1:] and not words[1].startswith("-") else []
        return [f"--{_FIRST[name]}", words[0], *count, *words[1:]]
    if name in ("train", "pairs", "relabel", "evaluate"):
        words = [re.sub(r"^--reward(?=$|=)", "--reward_funcs", word, count=1) for word in words]
    if name in ("report", "diff"):
        named = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        return [*(f"--runs={word}" for word in words[:named]), *_flags(words[named:], "--open", "--live", "--repeat")]
    if name in ("sft", "reward"):
        return _flags(words, "--resume", "--resume-anyway")
    if name != "train":
        return words
    plain = {"--resume": "--train.resume=true", "--resume-anyway": "--train.resume_anyway=true"}
    words = [plain.get(word, word) for word in words]
    return [f"--train.resume_from{word[13:]}" if word.startswith("--resume-from") else word for word in words]


def _flags(words: Sequence[str], *flags: str) -> list[str]:
    """``--flag`` as ``--flag=true``, unless true or false follows."""
    return [
        f"--{word[2:].replace('-', '_')}=true" if word in flags and after not in ("true", "false") else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]


def _derived(config: Checked) -> str:
    """Quantities derived from the configuration, as comments below its YAML."""
    summary: Callable[[], dict[str, Any]] | None = getattr(getattr(config, "train", None), "summary", None)
    if summary is None:
        return ""
    return "\n".join(["", *(f"# {key}: {value}" for key, value in summary().items())])


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    """Ctrl-C unwinds like an error; a second one meanwhile ends the program at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    raise KeyboardInterrupt


def _terminate(number: int, _frame: object) -> NoReturn:
    """SIGTERM and SIGHUP unwind like an error, so that processes are ended and files closed."""
    if number == signal.SIGHUP:  # the second SIGHUP of a closed terminal must not interrupt the unwinding
        signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
