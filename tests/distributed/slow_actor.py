"""What a Ray worker is told to run when it starts, so that sampling takes a while or the first actors are lost."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def slow_down() -> None:
    """A token takes so long that the learner publishes while a batch is being sampled."""
    from async_rlhf.generation.transformers_engine import TransformersEngine

    forward = TransformersEngine._forward

    def slowly(engine, *inputs, **options):
        time.sleep(0.05)
        return forward(engine, *inputs, **options)

    TransformersEngine._forward = slowly


def fail_to_fetch() -> None:
    """No weights can be had."""
    from async_rlhf.generation.ray import FetchedWeights

    def fail(weights, version, reference):
        raise OSError(f"no room for version {version}")

    FetchedWeights.fetch = fail


def lose_the_first() -> None:
    """The first two actors are lost before they have run, as on a node that is about to go; all leave a file."""
    from async_rlhf.distributed.ray import Signs

    begin = Signs.__init__

    def lose(actor):
        attempts = Path(os.environ["ATTEMPTS"])
        for number in ("first", "second"):
            with suppress(FileExistsError):
                attempts.joinpath(number).touch(exist_ok=False)
                os._exit(1)
        attempts.joinpath(str(os.getpid())).touch()
        begin(actor)

    Signs.__init__ = lose
