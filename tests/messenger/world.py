"""A small world around the machines: a decode node, prefill nodes, a wire, a fabric and memory.

The machines and the link layer are the real ones. The wire reorders and repeats datagrams; the fabric lands
each write whenever it likes, before or after its local completion; schedulers, fences and closes answer when
told to. A choice (an integer) picks the next action among those possible, so a list of integers is a history.

Memory is real bytes, and every page has an owner: a write that lands in a page which is not owned by the very
attempt it was posted for fails at once, and so does a request that becomes ready without all of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdserve.errors import FabricError, PdserveError, PeerLost, ProtocolError
from pdserve.messenger.decode import DecodeConfig, DecodeMachine
from pdserve.messenger.events import (
    ArmSlot,
    BatchDone,
    CancelCompute,
    CancelRequest,
    ChunkPlanned,
    Closed,
    CloseLink,
    ComputeFailed,
    DisarmSlot,
    Drain,
    Effect,
    Enqueue,
    Enqueued,
    Event,
    Failed,
    Fence,
    Fenced,
    Key,
    LinkLost,
    LinkUp,
    PagesSafe,
    PostWrites,
    Ready,
    Received,
    Refused,
    Rehello,
    Release,
    Send,
    SlotCounted,
    SlotOvershoot,
    SlotProgress,
    StepEnded,
    Submit,
    Ticked,
    Timer,
)
from pdserve.messenger.facts import GroupFacts, NodeFacts
from pdserve.messenger.geometry import CacheGroup, Geometry
from pdserve.messenger.imm import unpack
from pdserve.messenger.link import Link
from pdserve.messenger.messages import Load, decode, encode
from pdserve.messenger.prefill import PrefillConfig, PrefillMachine

PAGE_SIZE = 2
SEGMENT = 4
CACHE = (CacheGroup("model", 2, 2, 2), CacheGroup("draft", 1, 2, 2))
DECODE_PAGES = 40
PREFILL_PAGES = 14


def node_facts(name: str, role: str, tp: int = 1, pages: int = DECODE_PAGES, **changes: object) -> NodeFacts:
    facts: dict[str, object] = {
        "node_id": name,
        "incarnation": 1,
        "role": role,
        "model": "m",
        "cache_groups": CACHE,
        "dtype": "float32",
        "page_size": PAGE_SIZE,
        "segment_tokens": SEGMENT,
        "groups": (GroupFacts(tp, pages, 7),),
        "max_model_len": 64,
    }
    return NodeFacts(**(facts | changes))  # type: ignore[arg-type]


def true_byte(request: str, layer: int, page: int, head: int, offset: int) -> int:
    """What the model computes: a byte of a head's block of a page of a layer."""
    return (hash((request, layer, page, head)) + 7 * offset) % 250 + 1


def block_span(geometry: Geometry, rank: int, layer: int, page: int, head: int) -> tuple[int, int]:
    """[start, end) in a rank's arena of a head's block (head-major), by independent arithmetic."""
    start = 0
    for number, group in enumerate(geometry.cache_groups):
        first, end = geometry.heads_of(number, rank)
        block = geometry.page_size * group.token_bytes
        page_bytes = block * (end - first)
        if layer < group.layers:
            at = start + (layer * geometry.num_pages + page) * page_bytes + (head - first) * block
            return at, at + block
        start += group.layers * geometry.num_pages * page_bytes
        layer -= group.layers
    raise AssertionError("no such layer")


class Wire:
    """One link: both ends of the link layer and what is under way between them."""

    def __init__(self, link: int, peer: PrefillNode) -> None:
        self.link = link
        self.peer = peer
        key = bytes([link % 256]) * 32
        sizes = {"datagram_bytes": 160, "window": 4, "peer_window": 4}
        self.ends = {True: Link(link, key, initiator=True, **sizes)}  # type: ignore[arg-type]
        self.ends[False] = Link(link, key, initiator=False, **sizes)  # type: ignore[arg-type]
        self.bags: dict[bool, list[bytes]] = {True: [], False: []}
        """Datagrams under way, by whether they go to the prefill node."""
        self.up = {True: True, False: True}
        """Whether each side (True: decode) still uses the link."""
        self.fenced = False


class Write:
    """One posted write, read from source memory when it leaves, landed at most once."""

    def __init__(self, post: PostWrites, row: tuple[int, int, int, int]) -> None:
        self.post = post
        self.src, self.dst, self.length, self.imm = row
        self.data: bytes | None = None


class PrefillNode:
    """A prefill machine with a scheduler, a worker and its endpoint."""

    def __init__(self, world: World, name: str, tp: int) -> None:
        self.world = world
        self.facts = node_facts(name, "prefill", tp, PREFILL_PAGES)
        self.geometry = self.facts.geometry(0)
        self.layers = self.geometry.layers
        self.machine = PrefillMachine(PrefillConfig(self.facts))
        self.arenas = [bytearray(self.geometry.arena_bytes(rank)) for rank in range(tp)]
        self.free = list(range(1, PREFILL_PAGES))
        self.offers: list[Enqueue] = []
        self.held: dict[Key, list[int]] = {}
        """Source pages of each enqueued work, in order."""
        self.done_pages: dict[Key, int] = {}
        self.queue: list[Key] = []
        self.planned_steps = 0
        self.ended_steps = 0
        self.counter = 0
        self.steps: dict[int, list[tuple[Key, int, list[int]]]] = {}
        self.released_in_step: list[tuple[int, list[int]]] = []
        self.batches: dict[int, list[Write]] = {}
        self.closing: list[int] = []

    def tell(self, event: Event) -> None:
        self.perform(self.machine.handle(event, self.world.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(link, message):
                    self.world.send(link, False, encode(message))
                case Enqueue():
                    self.offers.append(effect)
                case CancelCompute(key):
                    assert key in self.held
                    if key in self.queue:
                        self.queue.remove(key)
                case PostWrites():
                    self.post(effect)
                case Release(key):
                    self.release(key)
                case CloseLink(link):
                    assert link not in self.closing
                    self.closing.append(link)
                case _:
                    raise AssertionError(effect)

    def post(self, effect: PostWrites) -> None:
        rows = effect.table.rows
        writes = []
        for at in range(0, len(rows), 4):
            src, dst, length, imm = rows[at : at + 4]
            row = (src + effect.src_shift, dst + effect.dst_shift, length, imm)
            writes.append(Write(effect, row))
        self.batches[effect.batch] = writes
        self.world.flying.extend(writes)

    def release(self, key: Key) -> None:
        """Source pages go back once no step under way names them."""
        pages = self.held.pop(key)
        assert not [w for ws in self.batches.values() for w in ws if w.post.key == key], "released while read"
        if key in self.queue:
            self.queue.remove(key)
        self.done_pages.pop(key)
        self.released_in_step.append((self.planned_steps, pages))
        self.collect()

    def collect(self) -> None:
        for entry in list(self.released_in_step):
            if entry[0] <= self.ended_steps:
                self.free.extend(entry[1])
                self.released_in_step.remove(entry)

    def answer(self, accept: bool) -> None:
        offer = self.offers.pop(0)
        needed = self.geometry.pages_for(offer.target)
        if not accept or needed > len(self.free):
            self.tell(Refused(offer.key, "overloaded", "busy", 0.5))
            return
        self.held[offer.key] = [self.free.pop(0) for _ in range(needed)]
        self.done_pages[offer.key] = 0
        self.queue.append(offer.key)
        self.tell(Enqueued(offer.key, len(self.queue) - 1))

    def plan(self, pages: int) -> None:
        """Plan a step with up to two works."""
        step = self.planned_steps
        self.planned_steps += 1
        chunks = self.steps[step] = []
        for key in self.queue[:2]:
            first = self.done_pages[key]
            chunk = self.held[key][first : first + pages]
            self.done_pages[key] = first + len(chunk)
            chunks.append((key, first, chunk))
            last = self.done_pages[key] == len(self.held[key])
            if last:
                self.queue.remove(key)
            self.tell(ChunkPlanned(key, step, first, chunk, last))

    def tick(self, count: int, told: bool) -> None:
        """The worker computes `count` layers (or the step's end); the machine is told, or finds out later."""
        for _ in range(count):
            step, layer = divmod(self.counter, self.layers + 1)
            if step not in self.steps:
                break
            if layer < self.layers:
                self.compute(step, layer)
            self.counter += 1
            if layer == self.layers:
                del self.steps[step]
                self.ended_steps = step + 1
                self.tell(StepEnded(step))
                self.collect()
        if told:
            self.tell(Ticked(self.counter))

    def compute(self, step: int, layer: int) -> None:
        group, _ = self.geometry.group_of_layer[layer]
        for key, first, pages in self.steps[step]:
            for index, page in enumerate(pages, first):
                for rank, arena in enumerate(self.arenas):
                    for head in range(*self.geometry.heads_of(group, rank)):
                        start, end = block_span(self.geometry, rank, layer, page, head)
                        for at in range(start, end):
                            arena[at] = true_byte(key.request, layer, index, head, at - start)

    def fail_compute(self) -> None:
        key = self.queue.pop(0)
        self.tell(ComputeFailed(key, "worker_failed", "rank 0 died", None))

    def leave(self, write: Write) -> None:
        """The write reads its source."""
        if write.data is None:
            write.data = bytes(self.arenas[write.post.table.src_rank][write.src : write.src + write.length])

    def complete(self, batch: int, error: PdserveError | None) -> None:
        for write in self.batches.pop(batch):
            self.leave(write)
        self.tell(BatchDone(batch, error))

    def close(self, told_first: bool = True) -> None:
        """The endpoint is closed: its batches end; what has left may still land."""
        link = self.closing.pop(0)
        mine = [batch for batch, writes in self.batches.items() if writes[0].post.link == link]
        for batch in mine:
            for write in self.batches.pop(batch):
                self.leave(write)
        self.world.wires[link].up[False] = False
        ends = [BatchDone(batch, FabricError("canceled", name="FI_ECANCELED")) for batch in mine]
        for event in [*ends, Closed(link)] if told_first else [Closed(link), *ends]:
            self.tell(event)


class World:
    """Everything, and the actions that are possible now."""

    def __init__(
        self,
        tps: tuple[int, ...] = (1, 2),
        decode_tp: int = 1,
        slots: int = 24,
        landing: int = 4,
        trouble: int = 3,
    ) -> None:
        """`landing`: how eagerly writes land. `trouble`: the rarer, the larger."""
        self.landing = landing
        self.trouble = trouble
        self.now = 100.0
        self.facts = node_facts("d0", "decode", decode_tp)
        self.geometry = self.facts.geometry(0)
        self.machine = DecodeMachine(DecodeConfig(self.facts, slots=slots))
        self.arenas = [bytearray(self.geometry.arena_bytes(rank)) for rank in range(decode_tp)]
        self.nodes = [PrefillNode(self, f"p{i}", tp) for i, tp in enumerate(tps)]
        self.wires: dict[int, Wire] = {}
        self.flying: list[Write] = []
        self.armed: dict[int, tuple[int, int, int]] = {}
        """slot -> (generation, expected, count)"""
        self.stale = 0
        self.free = list(range(1, DECODE_PAGES))
        self.owner: dict[int, str] = {}
        self.pages: dict[str, list[int]] = {}
        self.open: list[str] = []
        """Submitted, and the user still waits."""
        self.ended: dict[str, str] = {}
        """How each request ended for its user."""
        self.fences: list[int] = []
        self.rehellos: list[str] = []
        self.submitted = 0
        self.calm = False
        for node in self.nodes:
            self.hello(node)

    # ------------------------------------------------------------ decode node

    def tell(self, event: Event) -> None:
        self.perform(self.machine.handle(event, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(link, message):
                    self.send(link, True, encode(message))
                case ArmSlot(slot, generation, runs):
                    assert slot not in self.armed
                    self.armed[slot] = (generation, runs, 0)
                case DisarmSlot(slot, generation):
                    assert self.armed.pop(slot)[0] == generation
                case Ready(request):
                    self.end(request, "ready")
                    self.check_bytes(request)
                    self.free_pages(request)
                case Failed(request, error):
                    self.end(request, error.code)
                case PagesSafe(request):
                    assert request in self.ended, "safe before it ended"
                    self.free_pages(request)
                case Fence(link):
                    assert link not in self.fences
                    assert not self.wires[link].fenced
                    self.wires[link].up[True] = False
                    self.fences.append(link)
                case Rehello(node_id):
                    self.rehellos.append(node_id)
                case _:
                    raise AssertionError(effect)

    def end(self, request: str, how: str) -> None:
        assert request not in self.ended, f"{request} ended as {self.ended[request]} and as {how}"
        self.ended[request] = how
        self.open.remove(request)

    def free_pages(self, request: str) -> None:
        """Pages are wiped as their next owner would: a late write shows."""
        for page in self.pages.pop(request):
            assert self.owner.pop(page) == request
            self.free.append(page)

    def check_bytes(self, request: str) -> None:
        for index, page in enumerate(self.pages[request]):
            for layer in range(self.geometry.layers):
                group, _ = self.geometry.group_of_layer[layer]
                for rank, arena in enumerate(self.arenas):
                    for head in range(*self.geometry.heads_of(group, rank)):
                        start, end = block_span(self.geometry, rank, layer, page, head)
                        wanted = [true_byte(request, layer, index, head, at) for at in range(end - start)]
                        assert list(arena[start:end]) == wanted, f"{request}: layer {layer} page {index}"

    def submit(self, tokens: int, deadline_s: float | None = None) -> None:
        count = self.geometry.pages_for(tokens - 1)
        if count > len(self.free):
            return
        request = f"r{self.submitted}"
        self.submitted += 1
        self.pages[request] = [self.free.pop(0) for _ in range(count)]
        for page in self.pages[request]:
            self.owner[page] = request
        self.open.append(request)
        tokens_of = [self.submitted] * tokens
        self.tell(Submit(request, tokens_of, list(self.pages[request]), deadline_s=deadline_s))

    def cancel(self, request: str) -> None:
        self.end(request, "cancelled")
        self.tell(CancelRequest(request))

    # ------------------------------------------------------------ wire

    def hello(self, node: PrefillNode) -> None:
        link = len(self.wires) + 1
        self.wires[link] = Wire(link, node)
        node.tell(LinkUp(link, self.facts))
        self.tell(LinkUp(link, node.facts))

    def send(self, link: int, from_decode: bool, body: bytes) -> None:
        wire = self.wires[link]
        if wire.up[from_decode]:
            wire.ends[from_decode].send(body)
            self.transmit(wire, from_decode)

    def transmit(self, wire: Wire, from_decode: bool) -> None:
        wire.bags[from_decode].extend(wire.ends[from_decode].transmit())

    def deliver(self, wire: Wire, to_prefill: bool, index: int, again: bool = False) -> None:
        bag = wire.bags[to_prefill]
        datagram = bag[index % len(bag)] if again else bag.pop(index % len(bag))
        receiver = not to_prefill
        if not wire.up[receiver]:
            return
        for body in wire.ends[receiver].receive(datagram):
            event = Received(wire.link, decode(body))
            if receiver:
                self.tell(event)
            else:
                wire.peer.tell(event)
        if wire.up[receiver]:
            self.transmit(wire, receiver)

    # ------------------------------------------------------------ fabric

    def land(self, write: Write, lost: bool = False) -> None:
        """The write arrives, unless its port is closed or it is lost with its sender's endpoint."""
        self.flying.remove(write)
        wire = self.wires[write.post.link]
        if wire.fenced or lost:
            return
        wire.peer.leave(write)
        assert write.data is not None
        key, table = write.post.key, write.post.table
        for page in self.pages_of(write):
            owner = self.owner.get(page)
            assert owner == key.request, f"{key} wrote page {page}, which is {owner}'s"
        fetch = self.machine._fetches[key.request]
        assert fetch.attempt == key.attempt, f"a write of attempt {key.attempt} in {fetch.attempt}"
        self.arenas[table.dst_rank][write.dst : write.dst + write.length] = write.data
        self.count(write.imm)

    def pages_of(self, write: Write) -> set[int]:
        rank, group = write.post.table.dst_rank, write.post.table.cache_group
        pages = set()
        for page in range(DECODE_PAGES):
            first, end = self.geometry.heads_of(group, rank)
            start, _ = block_span(self.geometry, rank, write.post.layer, page, first)
            _, stop = block_span(self.geometry, rank, write.post.layer, page, end - 1)
            if start < write.dst + write.length and write.dst < stop:
                pages.add(page)
        assert pages
        return pages

    def count(self, imm: int) -> None:
        slot, generation, runs = unpack(imm)
        entry = self.armed.get(slot)
        if entry is None or entry[0] != generation:
            self.stale += 1
            return
        count = entry[2] + runs
        self.armed[slot] = (generation, entry[1], count)
        if count > entry[1]:
            self.tell(SlotOvershoot(slot, generation, count))
        elif count == entry[1]:
            self.tell(SlotCounted(slot, generation))
        else:
            self.tell(SlotProgress(slot, generation, count))

    def fence(self) -> None:
        link = self.fences.pop(0)
        self.wires[link].fenced = True
        self.tell(Fenced(link))

    # ------------------------------------------------------------ time

    def advance(self, seconds: float) -> None:
        """Time passes in steps that no machine takes for a pause."""
        while seconds > 0:
            step = min(seconds, 0.1)
            self.now += step
            seconds -= step
            for machine, tell in [(self.machine, self.tell), *((n.machine, n.tell) for n in self.nodes)]:
                due = machine.next_deadline()
                if due is not None and due <= self.now:
                    tell(Timer(Load(waiting_tokens=3)))

    # ------------------------------------------------------------ histories

    def actions(self) -> list[Callable[[int], None]]:
        """What can happen now; each takes the rest of the choice."""
        out: list[Callable[[int], None]] = []
        if not self.calm:
            out += [lambda c: self.submit(2 + c % 11, 3.0 if c % 5 == 0 else None)] * 2
            out += [lambda c: self.bother(c)]
        out += [lambda c: self.advance(0.05 + 0.05 * (c % 3) + (c % 8 == 0))]
        for wire in self.wires.values():
            for to_prefill in (True, False):
                if wire.bags[to_prefill]:
                    out += [partial(self.deliver, wire, to_prefill), partial(self.deliver, wire, to_prefill)]
        for node in self.nodes:
            if node.offers:
                out += [lambda c, n=node: n.answer(c % 6 != 0)]
            if node.queue and node.planned_steps - node.ended_steps < 2:
                out += [lambda c, n=node: n.plan(1 + c % 3)] * 2
            if node.steps:
                out += [lambda c, n=node: n.tick(1 + c % 3, c % 2 == 0)] * 2
            if node.batches:
                out += [lambda c, n=node: n.complete(sorted(n.batches)[c % len(n.batches)], None)] * 2
            if node.closing:
                out += [lambda c, n=node: n.close(c % 2 == 0)]
        if self.flying:
            out += [lambda c: self.land(self.flying[c % len(self.flying)])] * self.landing
        if self.fences:
            out += [lambda c: self.fence()]
        if self.rehellos:
            out += [lambda c: self.rehello()]
        return out

    def rehello(self) -> None:
        name = self.rehellos.pop(0)
        self.hello(next(node for node in self.nodes if node.facts.node_id == name))

    def bother(self, choice: int) -> None:
        """A cancel or a disturbance, if it is time for one."""
        rare, rest = choice % self.trouble, choice // self.trouble
        if rare == 0 and rest % 3 == 0 and self.open:
            self.cancel(self.open[rest // 3 % len(self.open)])
        elif rare == 0:
            self.disturb(rest // 3)

    def disturb(self, choice: int) -> None:
        """Rarer things: losses, failures, repeats, a drain."""
        kind, rest = choice % 12, choice // 12
        node = self.nodes[rest % len(self.nodes)]
        links = [wire for wire in self.wires.values() if wire.up[True] or wire.up[False]]
        wire = links[rest % len(links)] if links else None
        if kind == 0 and wire is not None and wire.up[True]:
            self.tell(LinkLost(wire.link, FabricError("reset", name="FI_ECONNRESET")))
        elif kind == 1 and wire is not None and wire.up[False]:
            wire.peer.tell(LinkLost(wire.link, PeerLost("gone")))
        elif kind == 2 and node.queue:
            node.fail_compute()
        elif kind == 3 and node.batches:
            node.complete(sorted(node.batches)[rest % len(node.batches)], FabricError("125", name="FI_EIO"))
        elif kind == 4 and self.flying:
            # In flight when the sender's endpoint went: it may as well never arrive.
            write = self.flying[rest % len(self.flying)]
            self.land(write, lost=not self.wires[write.post.link].up[False])
        elif kind == 5 and rest % 4 == 0:
            self.tell(Timer()) if rest % 8 else self.hello(node)
        elif kind == 6 and rest % 16 == 0:
            node.tell(Drain("draining"))
        elif kind == 7 and wire is not None and wire.bags[True]:
            self.deliver(wire, True, rest, again=True)
        elif kind == 8 and wire is not None and wire.bags[False]:
            self.deliver(wire, False, rest, again=True)
        elif kind == 9:
            self.now += 30.0  # everybody slept: nobody is dead for it

    def do(self, choice: int) -> None:
        actions = self.actions()
        actions[choice % len(actions)](choice // len(actions))
        self.machine.check()
        for node in self.nodes:
            node.machine.check()

    def settle(self) -> None:
        """No new work and no more trouble: everything must come to an end."""
        self.calm = True
        for round_ in range(600):
            for wire in self.wires.values():
                for to_prefill in (True, False):
                    for _ in range(len(wire.bags[to_prefill])):
                        self.deliver(wire, to_prefill, 0)
            for node in self.nodes:
                while node.offers:
                    node.answer(True)
                if node.queue and node.planned_steps - node.ended_steps < 2:
                    node.plan(2)
                node.tick(10, True)
                while node.batches:
                    node.complete(min(node.batches), None)
                while node.closing:
                    node.close()
            while self.flying:
                self.land(self.flying[0])
            while self.fences:
                self.fence()
            while self.rehellos:
                self.rehello()
            if round_ > 3 and self.machine.idle and all(node.machine.idle for node in self.nodes):
                return
            self.advance(0.1)

    def check_ended(self) -> None:
        """Everything has ended, and nothing is left anywhere."""
        assert self.machine.idle, self.machine.statistics()
        assert not self.open
        assert len(self.ended) == self.submitted
        assert not self.armed
        assert not self.owner
        assert sorted(self.free) == list(range(1, DECODE_PAGES))
        gauges = self.machine.statistics()
        kept = {"slots_free", "links_up", *self.machine.counters, "pauses"}
        assert {name: value for name, value in gauges.items() if value and name not in kept} == {}
        for node in self.nodes:
            assert node.machine.idle
            assert not node.held
            assert sorted(node.free) == list(range(1, PREFILL_PAGES))
            gauges = node.machine.statistics()
            kept = {"links_up", "batches_posted", "ticks", *node.machine.counters, "pauses"}
            assert {name: value for name, value in gauges.items() if value and name not in kept} == {}
        for machine in (self.machine, *(node.machine for node in self.nodes)):
            assert machine.counters["breaches"] == 0
            machine.check()


__all__ = ["ProtocolError", "World", "node_facts"]
