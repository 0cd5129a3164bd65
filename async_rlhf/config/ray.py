"""Where Ray finds its cluster, and what its actors need of the nodes that they are placed on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from async_rlhf.config.base import Checked, require


@dataclass(frozen=True)
class RayConfig(Checked):
    """Generators and reward workers as actors in a Ray cluster, for ``launch: ray``.

    The learner is the process that connects; it has to run on a node of the cluster.

    Args:
        address: of the cluster's head, such as "10.0.0.1:6379"; "auto" for the cluster that this host is a node of;
            "local" for a new one of this host alone, which ends with the run. Null takes RAY_ADDRESS, else "auto" where
            there is one, else "local".
        runtime_env: what Ray shall bring to the nodes for this run, such as {"working_dir": "."} for your own modules.
        num_cpus: CPUs that each generator reserves; it has so many threads, unless generation.num_threads says
            otherwise.
        num_gpus: GPUs that each generator reserves, perhaps a part of one; 0 samples on the CPU.
        labels: a generator is placed on nodes with these labels only, e.g. {"ray.io/accelerator-type": "H100"}.
        room_timeout: seconds that the cluster may take to find room for an actor and start it.
        reward_workers: actors that share the rewards of each batch, by the reward model and by functions; 0 has the
            learner's process compute them.
        reward_num_cpus: CPUs that each of these reserves; it has so many threads.
        reward_num_gpus: GPUs that each of these reserves; 0 runs the reward model on the CPU.
        reward_labels: labels of the nodes that these are placed on.
        reward_max_restarts: how often dead reward workers are started again before the run stops.
    """

    address: str | None = None
    runtime_env: dict[str, Any] = field(default_factory=dict)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    room_timeout: float = 300.0
    reward_workers: int = 0
    reward_num_cpus: float = 1.0
    reward_num_gpus: float = 0.0
    reward_labels: dict[str, str] = field(default_factory=dict)
    reward_max_restarts: int = 3

    def check(self) -> None:
        self.at_least(0, "num_cpus", "num_gpus", "reward_workers", "reward_num_cpus", "reward_num_gpus")
        self.at_least(0, "reward_max_restarts")
        self.above(0, "room_timeout")
        named = self.address in (None, "auto", "local") or re.fullmatch(r"[^\s/]+:\d+", str(self.address))
        right = 'must be "auto", "local" or "host:port" of the head; Ray\'s client (ray://) cannot share weights'
        require(bool(named), "address", self.address, right)
        for key in ("num_gpus", "reward_num_gpus"):
            value = getattr(self, key)
            require(value <= 1 or value == int(value), key, value, "must be a part of one GPU, or a whole number")
        for key in ("labels", "reward_labels"):
            labels = getattr(self, key)
            plain = all(isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) for value in labels.values())
            require(plain, key, labels, "must give each label one value, as text")
        if self.reward_workers == 0:
            for key in ("reward_num_cpus", "reward_num_gpus", "reward_labels", "reward_max_restarts"):
                default = getattr(RayConfig, key, {})
                right = "must be left out with reward_workers 0: rewards are computed by the learner's process"
                require(getattr(self, key) == default, key, getattr(self, key), right)
