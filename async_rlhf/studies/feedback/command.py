"""Asks people about a run's completions, or writes down what they have said."""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path
from urllib.parse import quote

from async_rlhf.config import ConfigError
from async_rlhf.config.base import require
from async_rlhf.run.feedback import ANSWERS, QUESTIONS
from async_rlhf.studies.feedback.config import PeopleConfig
from async_rlhf.studies.feedback.people import (
    LABEL_STUDIO,
    People,
    agreement,
    label_studio_tasks,
    pair_of,
    rating_of,
    said_by_all,
)
from async_rlhf.studies.feedback.server import make_server
from async_rlhf.system.files import write_file

logger = logging.getLogger(__name__)


def run_feedback(config: PeopleConfig) -> None:
    """Serve the page until Ctrl-C, or write the export.

    Raises:
        ConfigError: the run asks nobody, the port cannot be listened on, or there is nothing to export.
    """
    folder = Path(config.run).expanduser()
    asks = (folder / QUESTIONS).is_file() or (folder / ANSWERS).is_file()
    right = "must be the output folder of a run with train.feedback.ask, which has begun"
    require(asks, "run", config.run, right)
    if config.export is not None:
        _export(config, folder, Path(config.export).expanduser())
        return
    token = config.token or secrets.token_urlsafe(12)
    try:
        server = make_server(People(folder), config.host, config.port, token)
    except OSError as error:
        why = f"{config.host} cannot be listened on there ({error.strerror})"
        raise ConfigError(f"port: got {config.port}; must be a free one, or 0 for any: {why}") from error
    host, port = server.server_address[:2]
    print(f"http://{host!s}:{port}/?token={quote(token, safe='')}", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            logger.info("feedback: %s", agreement(said_by_all(folder)))


def _export(config: PeopleConfig, folder: Path, out: Path) -> None:
    require(config.overwrite or not out.exists(), "export", str(out), "is there already; set overwrite to replace it")
    said = said_by_all(folder)
    if config.format == "label_studio":
        tasks = label_studio_tasks(said)
        text, count = json.dumps(tasks, indent=1, ensure_ascii=False) + "\n", len(tasks)
    else:
        row_of = pair_of if config.format == "pairs" else rating_of
        rows = [row for question, _, what in said if (row := row_of(question, what)) is not None]
        text, count = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), len(rows)
    right = f"must be another one: of {len(said)} answers none is of this kind"
    require(count > 0, "format", config.format, right)
    write_file(out, text.encode(errors="backslashreplace").decode())  # JSON's escape of half a character
    logger.info("feedback: %s", agreement(said))
    logger.info("feedback: %d rows in %s", count, out)
    if config.format == "label_studio":
        for kind in sorted({question.ask for question, _, _ in said}):
            logger.info("feedback: a project for them has this labelling configuration: %s", LABEL_STUDIO[kind])
