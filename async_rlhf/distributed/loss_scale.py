"""Loss scaling for float16, whose smallest gradients would be 0.

The factor is a power of two, so dividing by it rounds nothing. One for all ways to share weights: torch's GradScaler
within DeepSpeed's ZeRO is stepped once for each group of parameters, and unscales only after gradients were clipped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

logger = logging.getLogger(__name__)

FIRST = 2.0**16
GROWTH_STEPS = 2000
_LARGEST = 2.0**32


class LossScale:
    """A factor on the loss that follows the range of the gradients (Micikevicius et al., arXiv 1710.03740, 3.2).

    A step whose gradient is not finite is skipped, and the factor halved; after :data:`GROWTH_STEPS` other steps in a
    row it is doubled. Every rank has one, and sees the same norms.
    """

    def __init__(self) -> None:
        self.value = FIRST
        self._steps = 0
        """Steps since the last change."""

    def overflowed(self, norms: Sequence[float]) -> bool:
        """Take note of a step's norms, and say whether the step must be skipped.

        Raises:
            FloatingPointError: not even the unscaled gradient is finite; the weights were not touched.
        """
        if all(map(math.isfinite, norms)):
            self._steps += 1
            if self._steps == GROWTH_STEPS:
                self.value, self._steps = min(2 * self.value, _LARGEST), 0
            return False
        if self.value <= 1:
            raise FloatingPointError(
                "the gradient is not finite in float16, even with a loss scale of 1; the weights were not touched"
            )
        self.value, self._steps = self.value / 2, 0
        logger.info("fp16: a gradient is beyond float16; its step is skipped, the loss scale is now %g", self.value)
        return True

    def state(self) -> list[float]:
        """The state, for JSON."""
        return [self.value, self._steps]

    def restore(self, state: Sequence[float]) -> None:
        """Restore what :meth:`state` returned."""
        self.value, self._steps = float(state[0]), int(state[1])
