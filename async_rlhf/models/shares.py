"""Work without gradients that several ranks share: each computes some of the batches, and all get every result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from async_rlhf.distributed.collectives import Ranks
from async_rlhf.models.rows import dealt

T = TypeVar("T")
U = TypeVar("U")


def in_shares(
    place: str, batches: Sequence[T], compute: Callable[[T], U], ranks: Ranks, together: bool = False
) -> list[U]:
    """What ``compute`` gives for each batch, in their order, on every rank. All ranks must call it.

    The batches do not depend on the number of ranks, so the results are those of one rank.

    Args:
        place: in the program; see :meth:`~async_rlhf.distributed.collectives.Ranks.meet`.
        batches: the same on every rank.
        compute: the result must be such that it can be pickled.
        ranks: who share the batches.
        together: every pass needs all ranks, as with sharded weights. Then a rank without a batch in the last round
            computes one again, and drops the result.
    """
    mine = [(compute(batch), counts) for batch, counts in dealt(batches, ranks.rank, ranks.count) if counts or together]
    everyone = ranks.gather(place, [result for result, counts in mine if counts])
    return [everyone[number % ranks.count][number // ranks.count] for number in range(len(batches))]
