"""Sampling in vLLM servers reached by URL: the learner's side. ``async-rlhf serve`` starts them.

Each server has one thread here. It gives the server one request after the other, each with the weights that the
schedule names; in flight it gives it all requests that it has, of whichever batches, and every new version as soon as
there is one. A server labels every token with the weights that drew it. So the learner notices if a server was
restarted or given other weights by somebody else; it loads the right weights and has the request sampled again. While a
server is away, the others take its requests.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.secrets import masked
from async_rlhf.generation.audit import probe_tokens
from async_rlhf.generation.broadcast import Sender, gpu_of
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.episodes.playing import Player
from async_rlhf.generation.protocol import (
    Completions,
    GeneratorError,
    Occupancy,
    Ready,
    Reply,
    Request,
    SamplingParams,
    work,
)
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.server_client import ServerClient, ServerGoneError, check_server, key_of
from async_rlhf.generation.vllm_requests import seeds_of
from async_rlhf.generation.worker import RequestHandler, serve
from async_rlhf.models.publish import SnapshotFolder, SnapshotRing, Snapshots
from async_rlhf.models.weights import differing
from async_rlhf.types import Prompt, Sample, Turn

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.05


class ServerGenerator(RemoteGenerator):
    """Servers that sample the requests of every batch; in flight, requests of several batches at a time.

    Raises:
        ConfigError: a server cannot be used, or serves another model.
    """

    kind, streams = "server", True

    def prepare(self, config: OnlineConfig, policy: PreTrainedModel) -> tuple[Snapshots, int]:
        """See :meth:`RemoteGenerator.prepare`."""
        generation, self.run = config.generation, uuid.uuid4().hex[:12]
        described = [
            check_server(url, policy.config, generation, config.max_length, config.router_replay)
            for url in generation.urls
        ]
        dtype = getattr(torch, generation.weights_dtype)
        snapshots: SnapshotFolder | SnapshotRing
        if generation.weights_transport == "folder":
            folder = Path(config.output_dir) / "weights"
            if generation.weights_dir is not None:  # several runs may use it
                folder = Path(generation.weights_dir) / f"async_rlhf-{self.run}"
            try:
                snapshots = SnapshotFolder(folder.absolute(), dtype, config.snapshots)
            except OSError as error:
                raise ConfigError(f"generation.weights_dir: {str(folder)!r} cannot be made: {error}") from error
            self.transports: list[Any] = [_FolderTransport(snapshots) for _ in described]
        else:
            on_gpus = all(process["device"] == "cuda" for processes in described for process in processes)
            snapshots = SnapshotRing.for_model(
                policy, dtype, config.snapshots, parallel=self.parallel, read_on_gpus=on_gpus
            )
            self.transports = [
                _NetworkTransport(snapshots, url, len(processes), _device(policy.device, processes))
                for url, processes in zip(generation.urls, described, strict=True)
            ]
        return snapshots, len(described)

    def make(self, number: int) -> ServerWorker:
        """See :meth:`RemoteGenerator.make`."""
        return ServerWorker(number, self)

    def _no_answer(self) -> GeneratorError:
        busy = [f"{worker.label}{worker.trouble}" for worker in self.workers if worker.open or worker.trouble]
        return GeneratorError(f"no answer for {self.config.timeout:g} s (generation.timeout) from {', '.join(busy)}")


class _FolderTransport:
    """How weights reach a server: as files."""

    def __init__(self, snapshots: SnapshotFolder) -> None:
        self._snapshots = snapshots

    async def load(self, client: ServerClient, version: int) -> list[dict[str, str]]:
        """Have the server load a version. Returns the digests of each of its processes."""
        file = self._snapshots.file(version)
        try:
            return await client.load(file)
        except GeneratorError as error:
            if "No such file" not in str(error):
                raise
            rule = f"generation.weights_dir: the server must see {str(file.parent)!r} under the same name"
            raise GeneratorError(f"{error}; {rule}") from error

    def close(self) -> None:
        """Let go of the server."""


class _NetworkTransport:
    """Stays connected to the server from one version to the next, until something goes wrong."""

    def __init__(self, snapshots: SnapshotRing, url: str, receivers: int, device: torch.device) -> None:
        self._snapshots, self._url, self._receivers, self._device = snapshots, url, receivers, device
        self._sender: Sender | None = None

    async def load(self, client: ServerClient, version: int) -> list[dict[str, str]]:
        specs = self._snapshots.specs
        if self._sender is None or not self._sender.is_connected():
            self.close()
            self._sender = Sender(self._url, self._receivers, self._device)
        sender = self._sender

        async def send() -> list[dict[str, str]]:
            try:
                await asyncio.to_thread(sender.send, self._snapshots.slot(version), specs)
            except ConnectionError as error:
                raise ServerGoneError(f"took no weights: {error}") from error
            return []

        async def receive() -> list[dict[str, str]]:
            digests = await client.receive({**sender.invitation(specs), "folded": self._snapshots.folded})
            if not all(digests):
                raise ServerGoneError("was restarted, and knows nothing of the connection to it")
            return digests

        try:
            return (await _together([receive(), send()]))[0]
        except BaseException:
            self.close()  # what is half sent cannot be continued
            raise

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


def _device(learner: torch.device, processes: Sequence[Mapping[str, Any]]) -> torch.device:
    """The device of the learner's end of a transfer: a GPU if both ends are on GPUs, else the CPU.

    NCCL refuses two ranks on one GPU, so to a server on the learner's own GPU the weights go through the host.
    """
    gpu = gpu_of(learner)
    apart = gpu is not None and all(process["device"] == "cuda" and process["gpu"] != gpu for process in processes)
    return learner if apart else torch.device("cpu")


class ServerEngine:
    """A server as an engine: prompts go there as requests that it computes together, weights from the snapshots.

    It plays episodes itself, each at its own pace: what a server computes depends on no other request.

    Args:
        client: of the server.
        worker: its thread here.
        generator: whose server it is.
    """

    refresh: Callable[[], None] | None = None

    def __init__(self, client: ServerClient, worker: ServerWorker, generator: ServerGenerator) -> None:
        self.params, self.version, self.occupancy = generator.params, -1, Occupancy()
        self._client, self._snapshots, self._vocabulary = client, generator.snapshots, generator.vocabulary
        self._label, self._transport = worker.label, worker.transport
        self._player, self._loop = worker.player, worker.loop
        self._prefix = f"{generator.run}:"
        """Distinguishes this run's weights from those of other runs."""
        self._heartbeat: Callable[[], None] = lambda: None

    @property
    def newest(self) -> int:
        """See :class:`~async_rlhf.generation.worker.Weights`."""
        return self._snapshots.newest

    def views(self, version: int) -> dict[str, Tensor]:
        """Nothing: the transport has the tensors."""
        return {}

    def heartbeat_with(self, heartbeat: Callable[[], None]) -> None:
        """See :class:`~async_rlhf.generation.protocol.Engine`."""
        self._heartbeat = heartbeat

    def generate(self, prompts: Sequence[Prompt], evaluated: int | None = None) -> Completions:
        """See :class:`~async_rlhf.generation.episodes.sampler.EpisodeSampler`."""
        waiting = iter(prompts)  # all at once: a server has a queue of its own
        completions = dict(self.stream(lambda _: list(waiting), evaluated))
        return [completions[number] for number in range(len(prompts))]

    def stream(
        self, more: Callable[[int], Sequence[Prompt]], evaluated: int | None = None
    ) -> Iterator[tuple[int, tuple[Sample, ...]]]:
        """See :class:`~async_rlhf.generation.protocol.Engine`."""
        loop, numbers = self._loop, count()
        places = max(1, self.params.batch_size // self.params.samples_per_prompt)
        tasks: dict[asyncio.Task[tuple[Sample, ...]], int] = {}
        try:
            while True:
                for prompt in more(places - len(tasks)) if len(tasks) < places else ():
                    tasks[loop.create_task(self._sample(prompt, evaluated))] = next(numbers)
                if not tasks:
                    return
                first = asyncio.wait(tasks, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                done, _ = loop.run_until_complete(first)
                self._heartbeat()
                for task in done:
                    yield tasks.pop(task), task.result()
                if self.refresh is not None:
                    self.refresh()
        finally:
            if tasks:  # of an error, or the end of the run
                for task in tasks:
                    task.cancel()
                    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody asks for it
                loop.run_until_complete(asyncio.wait(tasks))

    def take_seconds(self) -> float:
        """See :class:`~async_rlhf.generation.episodes.sampler.EpisodeSampler`."""
        return 0.0 if self._player is None else self._player.take_seconds()

    def load(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, str]:
        """Have the server hold a version, which the transport has; ``tensors`` is empty. Returns its digests."""
        digests = self._loop.run_until_complete(self._load(version))
        self.version = version
        return digests

    def probe(self) -> list[float]:
        """See :class:`~async_rlhf.generation.protocol.Engine`."""
        return self._loop.run_until_complete(self._probe())

    def close(self) -> None:
        """The server goes on."""

    async def _sample(self, prompt: Prompt, evaluated: int | None) -> tuple[Sample, ...]:
        """K completions, or K episodes."""
        params, player = self.params, self._player
        if player is None:
            return await self._ask(prompt, params)

        async def ask(turn: Turn) -> Sample:
            (answer,) = await self._ask(turn, replace(params, samples_per_prompt=1))
            return answer

        numbers = range(params.samples_per_prompt)
        return tuple(await _together(player.play(prompt, k, params, ask, evaluated) for k in numbers))

    async def _ask(self, prompt: Prompt, params: SamplingParams) -> tuple[Sample, ...]:
        (seed,) = seeds_of(params, [prompt])
        return await self._client.generate(prompt, params, seed, self._prefix)

    async def _probe(self) -> list[float]:
        logprobs = await self._client.prompt_logprobs(probe_tokens(self._vocabulary).tolist())
        if await self._client.weight_version() != f"{self._prefix}{self.version}":
            raise ServerGoneError("was given other weights while they were probed: somebody else uses it")
        return logprobs

    async def _load(self, version: int) -> dict[str, str]:
        client, expected = self._client, self._snapshots.published[version]
        if await client.weight_version() == f"{self._prefix}{version}":
            await client.resume()  # the answer to an earlier resume may have been lost
            return expected  # verified when they were loaded; the server forgets the label when it ends
        # Tokens that another run has under way must no longer count as drawn by that run's weights.
        await client.pause()
        await client.set_weight_version(f"{self._prefix}loading")
        # Each of the server's processes answers with the checksums of its share of the tensors.
        sums = {name: digest for share in await self._transport.load(client, version) for name, digest in share.items()}
        if wrong := differing(sums, expected):
            raise GeneratorError(f"{self._label} took weights that are not those of version {version}: {wrong}")
        await client.forget_cached()
        await client.set_weight_version(f"{self._prefix}{version}")
        await client.resume()
        return expected


class ServerWorker(Worker):
    """One server, and the thread that talks to it. It is never killed, and may come back whenever it likes.

    Args:
        number: among the servers.
        generator: whose worker it is.
    """

    has_begun = True
    has_place = False

    def __init__(self, number: int, generator: ServerGenerator) -> None:
        self.url = generator.config.urls[number]
        super().__init__(number, f"server {masked(self.url)}", generator.arrived)
        self.trouble, self._is_ending = "", False
        self._generator, self._key, self.transport = generator, key_of(generator.config), generator.transports[number]
        self.player = None if generator.params.episodes is None else Player(generator.params.episodes)
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self.runner.get_loop()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._handed_back, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=self.label)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Send a request. Returns at once."""
        self.open.append(request)
        self._requests.put(request)

    def start(self) -> None:
        """Look for it until it is there again: its requests have been given to others."""
        self.starts += 1
        self._handed_back.set()

    def close(self) -> None:
        """Disconnect from the server, which keeps running and drops what is under way."""
        self._closed.set()
        self._handed_back.set()
        self._requests.put(None)
        with suppress(RuntimeError):  # the loop has already ended
            self.loop.call_soon_threadsafe(self._cancel)
        self._thread.join(timeout=10)
        self.transport.close()

    def _cancel(self) -> None:
        for task in () if self._is_ending else asyncio.all_tasks(self.loop):
            task.cancel()

    def _serve(self) -> None:
        """Answer requests to the end; if the server goes away meanwhile, hand back what it has, and wait until it is
        there again. It may be given the same then.
        """
        with self.runner:
            client = ServerClient(self.url, self._key)
            try:
                while not self._closed.is_set() and self._is_lost_while_serving(client):
                    self._handed_back.clear()
                    self.arrive(None)
                    self._handed_back.wait()
                    while not (self._closed.wait(_RETRY_SECONDS) or self.loop.run_until_complete(client.is_there())):
                        pass
                    while not self._requests.empty():  # what it had got and not begun
                        self._requests.get()
                    self.arrive(Ready())
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                self.arrive(error)
            finally:
                self._is_ending = True
                self.loop.run_until_complete(client.aclose())
                if self.player is not None:
                    self.loop.run_until_complete(self.player.close())

    def _is_lost_while_serving(self, client: ServerClient) -> bool:
        """Answer requests until it is gone, or until None comes, which is the end."""
        engine = ServerEngine(client, self, self._generator)
        try:
            serve(RequestHandler(engine, engine, self._go_on, engine), self._requests, self._answered)
            return False
        except ServerGoneError as error:
            if not self.trouble:
                logger.warning("%s: %s%s", self.label, error, self._again())
            self.trouble = f" ({error})"
            return True

    def _go_on(self) -> None:
        if self._closed.is_set():
            raise asyncio.CancelledError

    def _answered(self, reply: Reply) -> None:
        self.trouble = ""
        self.arrive(reply)

    def _again(self) -> str:
        """What becomes of the requests that it has, in words."""
        batches = list(dict.fromkeys(work(request.batch) for request in self.open))
        verb = "is" if len(batches) == 1 else "are"
        again = f"; {' and '.join(batches)} {verb} sampled again once it is back, or by another server"
        return again if batches else ""


async def _together(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run them together and return their results; the first error cancels all and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in tasks]
