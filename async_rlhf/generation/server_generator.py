"""Sampling in vLLM servers reached by URL: the learner's side. ``async-rlhf serve`` starts them.

Each server has one thread here. It gives the server one request after the other, each with the weights that the
schedule names; in flight it gives it all requests that it has, of whichever batches, and every new version as soon as
there is one. A server labels every token with the weights that drew it. So the learner notices if a server was
restarted or given other weights by somebody else; it loads the right weights and has the request sampled again. While a
server is away, the others take its requests.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from asyncio import Condition, Event, Queue, Runner, Task, TaskGroup, current_task, new_event_loop, sleep, to_thread
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from async_rlhf.config import ConfigError, OnlineConfig
from async_rlhf.config.secrets import masked
from async_rlhf.generation.audit import probe_tokens
from async_rlhf.generation.broadcast import Sender, gpu_of
from async_rlhf.generation.dispatch import Worker
from async_rlhf.generation.episodes.playing import Player
from async_rlhf.generation.protocol import GeneratorError, Ready, Reply, Request, SamplingParams, fingerprint, work
from async_rlhf.generation.remote import RemoteGenerator
from async_rlhf.generation.server_client import ServerClient, ServerGoneError, check_server, key_of
from async_rlhf.generation.vllm_requests import seeds_of
from async_rlhf.models.publish import SnapshotFolder, SnapshotRing, Snapshots
from async_rlhf.models.weights import differing
from async_rlhf.types import Prompt, Sample, Turn, drawn_versions

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_RETRY_SECONDS = 1.0
_LOOK_FOR_WEIGHTS_SECONDS = 0.05


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
            right = f"generation.weights_dir: the server must see {str(file.parent)!r} under the same name"
            raise GeneratorError(f"{error}; {right}") from error

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
                await to_thread(sender.send, self._snapshots.slot(version), specs)
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
    own = gpu_of(learner)
    apart = own is not None and all(process["device"] == "cuda" and process["gpu"] != own for process in processes)
    return learner if apart else torch.device("cpu")


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
        self.trouble = ""
        self.params, self.snapshots, self.vocabulary = generator.params, generator.snapshots, generator.vocabulary
        self._transport, self._key = generator.transports[number], key_of(generator.config)
        self._prefix = f"{generator.run}:"
        """Distinguishes this run's weights from those of other runs."""
        self._player = None if self.params.episodes is None else Player(self.params.episodes)
        self._probed: tuple[int, list[float]] | None = None
        self._version, self._held = -1, dict[int, dict[str, str]]()
        self._weights = Condition()
        """Held while the weights change, and while they must not."""
        self._requests: Queue[Request | None] = Queue()
        self.runner = Runner(loop_factory=new_event_loop)
        self._loop = self.runner.get_loop()
        self._task: Task[None] | None = None
        self._handed_back = Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name=self.label)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Send a request. Returns at once."""
        self.open.append(request)
        self._put(request)

    def _put(self, request: Request | None) -> None:
        with suppress(RuntimeError):  # the loop has already ended, and the run will hear of it
            self._loop.call_soon_threadsafe(self._requests.put_nowait, request)

    def start(self) -> None:
        """Look for it until it is there again: its requests have been given to others."""
        self.starts += 1
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._handed_back.set)

    def close(self) -> None:
        """Disconnect from the server, which keeps running and drops what is under way."""
        self._put(None)
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(task.cancel)
        self._thread.join(timeout=10)
        self._transport.close()

    def _serve(self) -> None:
        with self.runner:
            try:
                self.runner.run(self._stay())
            except BaseException as error:
                self.arrive(error)
            finally:
                if self._player is not None:
                    self.runner.run(self._player.close())

    async def _stay(self) -> None:
        """Answer requests to the end; if the server goes away meanwhile, hand back what it has, and wait until it is
        there again. It may be given the same then.
        """
        self._task = current_task()
        ended = False
        while not ended:
            async with ServerClient(self.url, self._key) as client:
                try:
                    await self._answer_all(client)
                    return
                except ServerGoneError as error:
                    if not self.trouble:
                        logger.warning("%s: %s%s", self.label, error, self._again())
                    self.trouble = f" ({error})"
                self._handed_back.clear()
                self.arrive(None)
                await self._handed_back.wait()
                await sleep(_RETRY_SECONDS)
                while not await client.is_there():
                    await sleep(_RETRY_SECONDS)
            while not (ended or self._requests.empty()):  # what it had got and not begun
                ended = self._requests.get_nowait() is None
            self.arrive(Ready())

    def _again(self) -> str:
        """What becomes of the requests that it has, in words."""
        batches = list(dict.fromkeys(work(request.batch) for request in self.open))
        verb = "is" if len(batches) == 1 else "are"
        again = f"; {' and '.join(batches)} {verb} sampled again once it is back, or by another server"
        return again if batches else ""

    async def _answer_all(self, client: ServerClient) -> None:
        """Answer requests until None comes: in flight with others, or one after the other."""
        self._version, self._held = -1, {}
        request = await self._requests.get()
        while request is not None:
            if request.in_flight:
                request = await self._answer_in_flight(client, request)
            else:
                await self._answer(client, request)
                request = await self._requests.get()

    async def _answer_in_flight(self, client: ServerClient, request: Request | None) -> Request | None:
        """Answer this request and all that come, together, with the newest weights, until one comes that must wait for
        the end of all of them. Returns that one; None for the end.
        """
        ended = Event()

        async def take() -> None:
            nonlocal request
            async with TaskGroup() as group:
                while request is not None and request.in_flight:
                    group.create_task(self._answer(client, request))
                    request = await self._requests.get()
            ended.set()

        async def keep_new() -> None:
            while not ended.is_set():
                if self.snapshots.newest > self._version:
                    async with self._weights:
                        await self._hold(client, self.snapshots.newest)
                        self._weights.notify_all()
                await sleep(_LOOK_FOR_WEIGHTS_SECONDS)

        await _together([take(), keep_new()])
        return request

    async def _hold(self, client: ServerClient, version: int) -> None:
        """Have the server hold a version. Evicted versions can no longer appear in replies."""
        held = await self._load(client, version)
        self._held = {old: each for old, each in self._held.items() if old in self.snapshots.published}
        self._version, self._held[version] = version, held

    async def _answer(self, client: ServerClient, request: Request) -> None:
        """Answer a request: in flight beside others, with weights that may change, or alone with those that it names.
        Its first tokens must not be drawn by older weights than its own.
        """
        if request.in_flight:
            async with self._weights:
                await self._weights.wait_for(lambda: self._version >= request.after)
            started = loaded = time.monotonic()
        else:
            while self.snapshots.newest < request.after:
                await sleep(_LOOK_FOR_WEIGHTS_SECONDS)
            started = time.monotonic()
            await self._hold(client, self.snapshots.newest if request.version is None else request.version)
            loaded = time.monotonic()
        version, probe = self._version, None
        evaluated = None if request.params is None else -request.batch
        groups = await self._generate(client, request.prompts, request.params or self.params, evaluated)
        ended, drawn = time.monotonic(), {version, *drawn_versions(sample for group in groups for sample in group)}
        async with self._weights:
            held = {each: self._held[each] for each in drawn if each in self._held}
            if request.probe > 0 and self._version % request.probe == 0:
                probe = await self._probe(client, self._version)
        self.trouble, asked = "", fingerprint(request.prompts)
        reply = Reply(request.batch, version, held, asked, groups, started, ended, loaded - started)
        seconds = 0.0 if self._player is None else self._player.take_seconds()
        self.arrive(replace(reply, probe=probe, number=request.number, environment_seconds=seconds))

    async def _probe(self, client: ServerClient, version: int) -> tuple[int, list[float]]:
        """What the server says of the fixed sequences: computed once for weights that it was given."""
        if self._probed is None or self._probed[0] != version:
            found = await client.prompt_logprobs(probe_tokens(self.vocabulary).tolist())
            if await client.weight_version() != f"{self._prefix}{version}":
                raise ServerGoneError("was given other weights while they were probed: somebody else uses it")
            self._probed = version, found
        return self._probed

    async def _load(self, client: ServerClient, version: int) -> dict[str, str]:
        """Make sure that the server holds a version. Returns the digests of what it loaded."""
        expected = self.snapshots.published[version]
        if await client.weight_version() == f"{self._prefix}{version}":
            await client.resume()  # the answer to an earlier resume may have been lost
            return expected  # verified when they were loaded; the server forgets the label when it ends
        self._probed = None
        # Tokens that another run has under way must no longer count as drawn by that run's weights.
        await client.pause()
        await client.set_weight_version(f"{self._prefix}loading")
        # Each of the server's processes answers with the checksums of its share of the tensors.
        found = {name: one for share in await self._transport.load(client, version) for name, one in share.items()}
        if wrong := differing(found, expected):
            raise GeneratorError(f"{self.label} took weights that are not those of version {version}: {wrong}")
        await client.forget_cached()
        await client.set_weight_version(f"{self._prefix}{version}")
        await client.resume()
        return expected

    async def _generate(
        self, client: ServerClient, prompts: Sequence[Prompt], params: SamplingParams, evaluated: int | None
    ) -> list[tuple[Sample, ...]]:
        async def samples(prompt: Prompt, params: SamplingParams = params) -> tuple[Sample, ...]:
            (seed,) = seeds_of(params, [prompt])
            return await client.generate(prompt, params, seed, self._prefix)

        player = self._player
        if player is None:
            return await _together(map(samples, prompts))

        async def ask(turn: Turn) -> Sample:
            (answer,) = await samples(turn, replace(params, samples_per_prompt=1))
            return answer

        count = params.samples_per_prompt
        episodes = [(prompt, number) for prompt in prompts for number in range(count)]
        found = await _together(player.play(prompt, number, params, ask, evaluated) for prompt, number in episodes)
        return [tuple(found[first : first + count]) for first in range(0, len(found), count)]


async def _together(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run them together and return their results; the first error cancels all and is raised unchanged."""
    try:
        async with TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in tasks]
