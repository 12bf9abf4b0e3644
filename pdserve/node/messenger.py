"""What the shells of both messenger sides share: the links, and how a machine's words reach them."""

from __future__ import annotations

from abc import abstractmethod

from pdserve.errors import PdserveError
from pdserve.messenger.events import Event, LinkLost, LinkUp, Received
from pdserve.messenger.messages import Load, Message
from pdserve.node.links import FabricLink
from pdserve.node.shell import Crash, Machine, MachineShell, Spawn


class MessengerShell(MachineShell):
    """Runs one messenger machine over the links it has; owns them until it has closed them."""

    def __init__(self, machine: Machine, crash: Crash, spawn: Spawn) -> None:
        super().__init__(machine, crash)
        self._spawn = spawn
        self.links: dict[int, FabricLink] = {}

    def link_up(self, link: FabricLink) -> None:
        """A hello made this link: take it over and tell the machine, which hears of the link itself before
        it hears what has come through it, or that it is lost already."""
        self.links[link.id] = link
        failure: PdserveError | None = None
        try:
            link.connect()
        except PdserveError as error:
            failure = error
        self.feed(LinkUp(link.id, link.peer.node))
        if failure is None:
            link.deliver()
        else:
            link.lost(failure)

    def message_received(self, link: int, message: Message) -> None:
        """A link's `on_message`."""
        self.on_received(link, message)
        self.feed(Received(link, message))

    def link_lost(self, link: int, error: PdserveError) -> None:
        """A link's `on_lost`."""
        self.feed(LinkLost(link, error))

    def on_received(self, link: int, message: Message) -> None:
        """Called before the machine hears of a message (traces)."""

    def link_of(self, node_id: str) -> FabricLink | None:
        """The newest link to a node that is not closed."""
        for link in reversed(self.links.values()):
            if link.peer.node.node_id == node_id and not link.closed.is_set():
                return link
        return None

    def send(self, link: int, message: Message) -> None:
        found = self.links.get(link)
        if found is not None:
            found.send(message)

    def close_link(self, link: int, done: Event) -> None:
        """Close a link's port, then feed `done`."""
        found = self.links.get(link)
        if found is None:
            self.feed(done)
        else:
            self._spawn(self._close(found, done), f"close link {link:016x}")

    async def _close(self, link: FabricLink, done: Event) -> None:
        await link.close()
        self.links.pop(link.id, None)
        self.feed(done)

    async def close_links(self) -> None:
        """Close every port: at the end of a node, when the machine is asked nothing more."""
        for link in list(self.links.values()):
            await link.close()
        self.links.clear()

    @abstractmethod
    def load(self) -> Load: ...
