"""Where vLLM sends the tokens of a mixture of experts, in the process that holds the model.

On a GPU vLLM returns routes with its answers (``enable_return_routed_experts``), which takes its current model runner.
On a CPU vLLM 0.32 has only the older one. There the routes are kept here, in the order of the cache of keys and values:
each token's lie where its keys do. So a prompt that is read once for its K completions has routes for all of them, and
what vLLM computes again overwrites what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from async_rlhf.types import RouteShape


class KeptRoutes:
    """The routes of requests, on the side of the engine.

    Args:
        llm: of vLLM, just started.
        shape: of the routes.
    """

    def __init__(self, llm: Any, shape: RouteShape) -> None:
        self._llm = llm
        self._under_way: dict[str, tuple[str, int]] = {}
        """Request and number of each completion, by vLLM's own name for it."""
        self._ended: dict[tuple[str, int], np.ndarray] = {}
        llm.collective_rpc(keep_routes, args=(shape,))

    def follow(self, request: str, internal: str, completions: int) -> None:
        """Keep the routes of a request, which vLLM calls ``internal``."""
        names = [internal] if completions == 1 else [f"{number}_{internal}" for number in range(completions)]
        self._under_way |= {name: (request, number) for number, name in enumerate(names)}

    def look(self) -> None:
        """After each step: read the routes of completions that have just ended, before the next overwrites them."""
        living = self._llm.llm_engine.output_processor.request_states
        names = [name for name in self._under_way if name not in living]
        if names:
            per_request, *_ = self._llm.collective_rpc(routes_of, args=(names,))
            self._ended |= {self._under_way.pop(name): routes for name, routes in zip(names, per_request, strict=True)}

    def take(self, request: str, number: int) -> np.ndarray:
        """(T - 1, L, E), of one completion that has ended."""
        return self._ended.pop((request, number))


class CachedRoutes:
    """The routes of all tokens in the cache.

    Args:
        worker: of vLLM, with one cache for all layers.
        shape: of the routes.
    """

    def __init__(self, worker: Any, shape: RouteShape) -> None:
        self._runner = worker.model_runner
        self._block = self._runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        slots = self._runner.kv_cache_config.num_blocks * self._block
        self._routes_NLE = np.zeros((slots, shape.layers, shape.per_token), shape.dtype)
        bind_routed_experts_capturer(self._runner.get_model(), self)  # it only calls capture()

    def capture(self, layer: int, chosen_NE: Tensor) -> None:
        """Called by each router, with the experts of the tokens of a step."""
        slots = get_forward_context().slot_mapping
        if slots:  # there are none in passes that only warm up
            slots_N = next(iter(slots.values()))[: len(chosen_NE)].numpy()
            self._routes_NLE[slots_N, layer] = chosen_NE.numpy()

    def of(self, request: str) -> np.ndarray:
        """(T - 1, L, E), of a request that has ended with the last step: the last token was never read.

        Raises:
            RuntimeError: the cache has dropped the first tokens, as it may with a sliding window.
        """
        state = self._runner.requests[request]
        places_N = np.arange(state.num_tokens - 1)
        blocks_N = np.array(state.block_ids[0])[places_N // self._block]
        if not blocks_N.all():  # block 0 holds nothing
            raise RuntimeError("router_replay: vLLM's cache has dropped tokens whose routes are needed")
        return self._routes_NLE[blocks_N * self._block + places_N % self._block]


def keep_routes(worker: Any, shape: RouteShape) -> None:
    """In vLLM's process: from now on, keep the routes of what is in the cache."""
    worker.async_rlhf_routes = CachedRoutes(worker, shape)


def routes_of(worker: Any, requests: Sequence[str]) -> list[np.ndarray]:
    """In vLLM's process: the routes of requests that have ended with the last step; see :meth:`CachedRoutes.of`."""
    return [worker.async_rlhf_routes.of(request) for request in requests]
