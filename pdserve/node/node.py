"""One node: everything wired together, from the first line of configuration to the last closed handle.

    outer group    fabric pump, link closers           outlive the inner one, so that ports can be fenced
      inner group  engine loop, layer watcher, a connection a peer
        serve      until `stop` or a fault

A fault in any of them ends the node with that one cause. Resources close in the reverse order of their
opening: HTTP, links (the fence: nothing can land any more), fabric, worker and its memory.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from pdserve.config import NodeConfig
from pdserve.config.environment import child_environment
from pdserve.engine.events import Event as EngineEvent
from pdserve.engine.events import Scheduled
from pdserve.engine.limits import Role, SchedulerConfig
from pdserve.engine.plan import StepResult
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.errors import ConfigError, WorkerError
from pdserve.fabric import Fabric, ImmCounters, Topology, library
from pdserve.fabric import FabricConfig as FabricOptions
from pdserve.http.app import build_app, make_runner
from pdserve.http.config import HttpConfig
from pdserve.http.frontend import Health
from pdserve.messenger.decode import DecodeConfig, DecodeMachine
from pdserve.messenger.prefill import PrefillConfig, PrefillMachine
from pdserve.node import ending, identity
from pdserve.node.decode_messenger import DecodeMessenger
from pdserve.node.engine_loop import EngineLoop
from pdserve.node.frontend import NodeFrontend
from pdserve.node.health import health_of
from pdserve.node.hello_server import HelloServer
from pdserve.node.loading import LoadingBar
from pdserve.node.peers import PeerConnection
from pdserve.node.prefill_messenger import PrefillMessenger
from pdserve.node.self_test import self_test, this_machine
from pdserve.node.snapshot import snapshot
from pdserve.node.tracing import fetch_merged
from pdserve.node.watcher import LayerWatcher
from pdserve.observe.metrics import NodeMetrics
from pdserve.observe.trace import TraceStore
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.link import WorkerProcess
from pdserve.worker.protocol import Init

log = logging.getLogger(__name__)

LOOPBACK_SECRET = b"pdserve: no cluster secret, loopback only"
"""What stands for a secret where none is configured; `config` allows that on loopback addresses alone."""


class Node:
    """A node of any role on the running loop. Several may live in one process."""

    def __init__(self, config: NodeConfig, *, gate: bool = False, fault: str = "") -> None:
        """`gate`, `fault`: for tests, as in `worker.protocol.Init`."""
        self.config = config
        self.role = Role(config.engine.role)
        self.ready = asyncio.Event()
        self.url = ""
        self.name = identity.node_id(config, config.server.port)
        self.scheduler: Scheduler
        self.worker: WorkerProcess
        self.engine: EngineLoop
        self.frontend: NodeFrontend
        self.fabric: Fabric | None = None
        self.topology: Topology
        self.counters = ImmCounters()
        self.decode: DecodeMessenger | None = None
        self.prefill: PrefillMessenger | None = None
        self.peers: list[PeerConnection] = []
        self.hello_server: HelloServer | None = None
        self.traces: TraceStore
        self.metrics: NodeMetrics
        self._gate = gate
        self._fault = fault
        self.stopping = asyncio.Event()
        self.hurry = asyncio.Event()
        self._changed = asyncio.Event()
        self.cause: BaseException | None = None
        self._ended = asyncio.Event()
        self._outer: asyncio.TaskGroup
        self._watcher: LayerWatcher | None = None
        self._http: aiohttp.ClientSession
        self.worker_error: WorkerError | None = None

    # From outside.

    def stop(self) -> None:
        """Drain and end. A second call ends at once."""
        if self.stopping.is_set():
            self.hurry.set()
        self.stopping.set()
        self._ended.set()

    def crash(self, cause: BaseException) -> None:
        """End with this cause. The first one counts."""
        if self.cause is None:
            self.cause = cause
            self._ended.set()

    async def run(self, on_ready: Callable[[Node], None] | None = None) -> None:
        """Serve until `stop`. Raises the one cause of an end that nobody asked for.

        Cancelling closes everything without draining.
        """
        weights = identity.find_model(self.config)
        self.topology = this_machine()
        if self.role is not Role.BOTH:
            library.load(self.config.fabric.library)
        try:
            async with asyncio.TaskGroup() as group:
                live = group.create_task(self._live(weights, on_ready), name="node")
                loading = group.create_task(self._stop_loading(live), name="stop while loading")
                live.add_done_callback(lambda _: loading.cancel())
        except BaseExceptionGroup as errors:
            raise _one_cause(errors) from errors

    async def _stop_loading(self, live: asyncio.Task[None]) -> None:
        """A stop before the node is ready has nothing to drain."""
        await self.stopping.wait()
        if not self.ready.is_set():
            live.cancel()

    # Start.

    async def _live(self, weights: identity.ServedWeights, on_ready: Callable[[Node], None] | None) -> None:
        async with AsyncExitStack() as stack:
            self._http = await stack.enter_async_context(aiohttp.ClientSession())
            await self._listen(stack, weights)
            await self._start_worker(stack, weights)
            self._build_scheduler(weights)
            if self.role is Role.BOTH:
                await self._serve(on_ready)
                return
            options = self.config.fabric
            fabric = Fabric.open(
                FabricOptions(
                    provider=options.provider, host=options.host, mode=options.mode, library=options.library
                )
            )
            self.fabric = await stack.enter_async_context(fabric)
            async with asyncio.TaskGroup() as self._outer:
                pump = self._outer.create_task(self.fabric.run(), name="fabric pump")
                try:
                    await self_test(self.fabric, self.topology, measure=options.self_test)
                    self._build_messenger(weights)
                    await self._serve(on_ready)
                finally:
                    await self._close_links()
                    pump.cancel()

    async def _listen(self, stack: AsyncExitStack, weights: identity.ServedWeights) -> None:
        """Answer HTTP from the start: /health says that the model is loading."""
        config = self.config
        card = identity.served_model(config, weights)
        self.metrics = NodeMetrics(card.names[0])
        tokenizer = Tokenizer.load(weights.directory)
        if self.role is Role.PREFILL:
            self.hello_server = HelloServer(self._secret())
        self.traces = TraceStore(self.name, self.role.value)
        self.frontend = NodeFrontend(
            card,
            self.metrics,
            self.traces,
            seed=config.model.seed,
            health=self.health,
            trace=self._trace,
        )
        self.frontend.on_idle = self._changed.set
        self.metrics.attach(lambda: snapshot(self))
        keys = () if config.server.api_key is None else (config.server.api_key,)
        http = HttpConfig(
            api_keys=keys,
            max_body_bytes=config.server.max_body_bytes,
            shutdown_timeout=1.0,  # what runs has had its time in `_drain`
        )
        app = build_app(self.frontend, tokenizer, http, self.metrics)
        if self.hello_server is not None:
            self.hello_server.add_routes(app)
        runner = make_runner(app, http)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, config.server.host, config.server.port)
        try:
            await site.start()
        except OSError as error:
            where = f"server.host = {config.server.host}, server.port = {config.server.port}"
            raise ConfigError(f"cannot listen ({where}): {error.strerror or error}") from error
        host, port = runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.name = self.traces.node = identity.node_id(config, port)
        log.info("%s node %s listens on %s", self.role.value, self.name, self.url)

    async def _start_worker(self, stack: AsyncExitStack, weights: identity.ServedWeights) -> None:
        config = self.config
        with LoadingBar(weights.name) as bar:
            self.worker = await WorkerProcess.start(
                Init(
                    model_dir=str(weights.directory),
                    page_size=config.engine.page_size,
                    num_pages=config.engine.num_pages or 0,
                    kv_cache_memory_bytes=config.engine.kv_cache_memory_bytes,
                    dtype=config.model.dtype,
                    kv_cache_dtype=config.model.kv_cache_dtype,
                    max_num_seqs=config.engine.max_num_seqs,
                    max_num_batched_tokens=config.engine.max_num_batched_tokens,
                    max_model_len=identity.max_model_len(config, weights.card),
                    batch_invariant=config.engine.batch_invariant,
                    threads=config.engine.threads,
                    cpus=None if config.engine.cpus is None else list(config.engine.cpus),
                    seed=config.model.seed,
                    gate=self._gate,
                    fault=self._fault,
                ),
                on_result=self._on_result,
                on_exit=self._on_worker_exit,
                on_progress=bar.progress,
                name=f"{self.name} rank0",
                env=child_environment(),
            )
        stack.push_async_callback(self.worker.stop)

    def _build_scheduler(self, weights: identity.ServedWeights) -> None:
        engine = self.config.engine
        ready = self.worker.ready
        self.scheduler = Scheduler(
            SchedulerConfig(
                role=self.role,
                page_size=ready.page_size,
                num_pages=ready.num_pages,
                max_num_seqs=engine.max_num_seqs,
                max_num_batched_tokens=engine.max_num_batched_tokens,
                max_model_len=identity.max_model_len(self.config, weights.card),
                max_waiting=engine.max_waiting,
                steps_in_flight=engine.steps_in_flight,
            )
        )
        held = (ready.num_pages - 1) * ready.page_size + 1
        card = self.frontend.card
        self.frontend.card = msgspec.structs.replace(card, max_model_len=min(card.max_model_len, held))
        self.engine = EngineLoop(
            self.scheduler,
            self.worker.submit,
            self.metrics,
            on_receiving=self._on_receiving,
            on_scheduled=self._on_scheduled,
            on_step_ended=self._on_step_ended,
            on_event=self._on_engine_event,
        )
        log.info(
            "KV cache: %d pages of %d tokens, %.0f MiB",
            ready.num_pages,
            ready.page_size,
            ready.arena_bytes / 2**20,
        )

    def _build_messenger(self, weights: identity.ServedWeights) -> None:
        cluster = self.config.cluster
        facts = identity.node_facts(self.config, weights, self.worker.ready, self.name)
        assert self.fabric is not None
        arena = self.worker.arena.buffer
        if self.hello_server is not None:
            prefill = PrefillMachine(
                PrefillConfig(
                    node=facts,
                    vocab_size=self.worker.ready.vocab_size,
                    heartbeat_s=cluster.heartbeat_s,
                    dead_s=cluster.dead_s,
                )
            )
            self.prefill = PrefillMessenger(
                prefill,
                self.scheduler,
                self.traces,
                crash=self.crash,
                spawn=self._spawn,
                wake=self._wake,
            )
            self._watcher = LayerWatcher(self.worker.counter, self.worker.tick_fd, self.prefill.ticked)
            self.hello_server.start(facts, self.prefill, self.fabric, self.counters, arena)
            return
        decode = DecodeMachine(
            DecodeConfig(node=facts, heartbeat_s=cluster.heartbeat_s, dead_s=cluster.dead_s)
        )
        self.decode = DecodeMessenger(
            decode,
            self.scheduler,
            self.counters,
            self.traces,
            self.metrics,
            crash=self.crash,
            spawn=self._spawn,
            wake=self._wake,
            on_failed=self.frontend.fail,
        )
        self.peers = [
            PeerConnection(
                url,
                self._secret(),
                facts,
                self.decode,
                self.fabric,
                self.counters,
                arena,
                self._http,
                self._changed.set,
            )
            for url in cluster.prefill_peers
        ]

    # Run.

    async def _serve(self, on_ready: Callable[[Node], None] | None) -> None:
        """From ready to drained. Raises the cause where something else ended the node."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.engine.run(), name="engine loop")]
            if self._watcher is not None:
                tasks.append(group.create_task(self._watcher.run(), name="layer watcher"))
            tasks += [group.create_task(peer.run(), name=f"peer {peer.url}") for peer in self.peers]
            self.frontend.start(self.scheduler, self.decode, self._wake)
            gc.collect()
            gc.freeze()
            self.ready.set()
            if on_ready is not None:
                on_ready(self)
            try:
                await self._ended.wait()
                if self.cause is not None:
                    raise self.cause
                await ending.drain(self)
                if self.cause is not None:
                    raise self.cause
            finally:
                ending.give_up(self)
                for task in tasks:
                    task.cancel()
                gc.unfreeze()

    async def _close_links(self) -> None:
        if self.prefill is not None:
            await ending.farewell(self, self.prefill)
        for messenger in (self.decode, self.prefill):
            if messenger is not None:
                await messenger.close_links()
                messenger.close()

    # What the parts tell each other.

    def _wake(self) -> None:
        self.engine.wake()
        self._changed.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._outer.create_task(coroutine, name=name)

    def _on_result(self, result: StepResult) -> None:
        self.engine.result(result)

    def _on_worker_exit(self, error: WorkerError) -> None:
        log.error("%s", error)
        self.worker_error = error
        self.crash(error)

    def _on_receiving(self, request: Request) -> None:
        assert self.decode is not None
        self.decode.fetch(request)

    def _on_scheduled(self, scheduled: Scheduled) -> None:
        if self.prefill is not None:
            self.prefill.scheduled(scheduled)

    def _on_step_ended(self, step: int) -> None:
        if self.prefill is not None and self._watcher is not None:
            self._watcher.look()
            self.prefill.step_ended(step)

    def _on_engine_event(self, event: EngineEvent) -> None:
        if self.prefill is not None:
            self.prefill.engine_event(event)
        else:
            self.frontend.engine_event(event)

    # Observation.

    def health(self) -> Health:
        """What /health and /live answer."""
        return health_of(self)

    async def _trace(self, request_id: str) -> dict[str, Any] | None:
        return await fetch_merged(
            self.traces, request_id, self._peer_url, self._http, self.config.server.api_key
        )

    def _peer_url(self, node_id: str) -> str | None:
        for peer in self.peers:
            if peer.link is not None and peer.link.peer.node.node_id == node_id:
                return peer.url
        return None

    def _secret(self) -> bytes:
        secret = self.config.cluster.secret
        return LOOPBACK_SECRET if secret is None else secret.encode()

    @property
    def quiet(self) -> bool:
        """Nothing is under way to or from any peer."""
        return all(m is None or m.machine.idle for m in (self.decode, self.prefill))

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, is being received or sent, or is quarantined, here or towards any peer."""
        return not self.frontend.generations and self.scheduler.idle and self.quiet

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until a condition holds; not beyond `seconds`, a second stop or a fault."""
        deadline = time.monotonic() + seconds
        while not condition() and self.cause is None and not self.hurry.is_set():
            await self.changed()
            if time.monotonic() >= deadline:
                return

    async def changed(self) -> None:
        """Wait until something may have changed, but 20 ms at most: not every change is announced."""
        self._changed.clear()
        try:
            async with asyncio.timeout(0.02):
                await self._changed.wait()
        except TimeoutError:
            pass

    def check(self) -> None:
        """Prove the invariants of every pure core: pages, slots, states. Raises AssertionError."""
        self.scheduler.check()
        for messenger in (self.decode, self.prefill):
            if messenger is not None:
                messenger.machine.check()


def _one_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of a group that is not a cancellation."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        else:
            leaves.append(error)
    faults = [error for error in leaves if not isinstance(error, asyncio.CancelledError)]
    return (faults or leaves)[0]
