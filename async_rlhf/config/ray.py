"""Where Ray finds its cluster, and what actors need from the nodes that they are placed on."""

from __future__ import annotations

import re
from typing import Any

from async_rlhf.config.base import Checked, Rule, configuration, key

_ADDRESS = Rule(
    lambda value: value in ("auto", "local") or re.fullmatch(r"[^\s/]+:[0-9]+", value) is not None,
    'must be "auto", "local" or "host:port" of the head; Ray\'s client (ray://) cannot share weights',
)
_GPUS = Rule(lambda value: value <= 1 or value == int(value), "must be a part of one GPU, or a whole number")
_LABELS = Rule(
    lambda labels: all(re.fullmatch(r"[\w.-]+", value) for value in labels.values()),
    "must give each label one value, as text",
)


@configuration
class RayConfig(Checked):
    """Generators and reward workers as actors in a Ray cluster, for ``launch: ray``.

    The learner is the process that connects; it must run on a node of the cluster.
    """

    address: str | None = key(None, _ADDRESS, role="place")
    """Address of the cluster's head, such as "10.0.0.1:6379"; "auto" for the cluster that this host is a node of;
    "local" for a new one on this host alone, which ends with the run. Null takes RAY_ADDRESS, else "auto" if there is
    such a cluster, else "local"."""
    runtime_env: dict[str, Any] = key({}, role="place")
    """What Ray copies to the nodes for this run, such as {"working_dir": "."} for your own modules."""
    num_cpus: float = key(1.0, ge=0, role="speed")
    """CPUs that each generator reserves; it uses as many threads, unless generation.num_threads says otherwise."""
    num_gpus: float = key(0.0, _GPUS, ge=0, role="place")
    """GPUs that each generator reserves, possibly a fraction of one; 0 samples on the CPU."""
    labels: dict[str, str] = key({}, _LABELS, role="place")
    """A generator is placed on nodes with these labels only, e.g. {"ray.io/accelerator-type": "H100"}."""
    room_timeout: float = key(300.0, gt=0, role="speed")
    """Seconds that the cluster may take to find room for an actor and start it."""
    reward_workers: int = key(0, ge=0, role="speed")
    """Actors that share the rewards of each batch, by reward model and by functions; with 0 the learner's process
    computes them."""
    reward_num_cpus: float = key(1.0, ge=0, role="speed")
    """CPUs that each reward worker reserves; it uses as many threads."""
    reward_num_gpus: float = key(0.0, _GPUS, ge=0, role="place")
    """GPUs that each reward worker reserves; 0 runs the reward model on the CPU."""
    reward_labels: dict[str, str] = key({}, _LABELS, role="place")
    """Labels of the nodes that reward workers are placed on."""
    reward_max_restarts: int = key(3, ge=0, role="speed")
    """How often dead reward workers are restarted before the run stops."""

    def check(self) -> None:
        if self.reward_workers == 0:
            names = ("reward_num_cpus", "reward_num_gpus", "reward_labels", "reward_max_restarts")
            self.leaves_out(names, "with reward_workers 0: rewards are computed by the learner's process")
