"""What the fork server loads first where there are simulated GPUs: its workers have them too."""

from __future__ import annotations

import simulated_device

import async_rlhf.generation.worker  # noqa: F401
from async_rlhf.models import publish

simulated_device.install()
publish.reduce_tensor = simulated_device.share_tensor
