"""What a Ray worker is told to run when it starts, so that sampling takes a while."""

from __future__ import annotations

import time


def slow_down() -> None:
    """A token takes so long that the learner publishes while a batch is being sampled."""
    from async_rlhf.generation.transformers_engine import TransformersEngine

    forward = TransformersEngine._forward

    def slowly(engine, *inputs, **options):
        time.sleep(0.05)
        return forward(engine, *inputs, **options)

    TransformersEngine._forward = slowly
