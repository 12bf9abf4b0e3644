"""Hello on the prefill side: the two routes that decode nodes call, and the links they lead to.

A caller that has not proved to know the cluster secret costs one nonce in a bounded table. Nothing is opened
for it, and nothing it says is looked at.
"""

from __future__ import annotations

import logging
import secrets
import time

from aiohttp import web

from pdserve.errors import FabricError, HelloRefused, PeerLost, ProtocolError
from pdserve.fabric import Fabric, ImmCounters
from pdserve.messenger.facts import NodeFacts, unfit
from pdserve.messenger.hello import NONCE_BYTES, Responder, Verified
from pdserve.node.links import FabricLink, PeerPort
from pdserve.node.peers import CHALLENGE_PATH, CONTENT_TYPE, HELLO_PATH, read_body
from pdserve.node.prefill_messenger import PrefillMessenger

log = logging.getLogger(__name__)


class HelloServer:
    """Answers hellos once `start` was called; before, and while draining, with 503."""

    def __init__(self, secret: bytes) -> None:
        self.hellos: dict[str, int] = {"accepted": 0, "refused": 0, "failed": 0}
        self._responder = Responder(secret)
        self._facts: NodeFacts | None = None
        self._messenger: PrefillMessenger
        self._fabric: Fabric
        self._counters: ImmCounters
        self._arena: memoryview
        self._told: set[str] = set()
        self._busy: set[str] = set()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post(CHALLENGE_PATH, self._challenge)
        app.router.add_post(HELLO_PATH, self._hello)

    def start(
        self,
        facts: NodeFacts,
        messenger: PrefillMessenger,
        fabric: Fabric,
        counters: ImmCounters,
        arena: memoryview,
    ) -> None:
        """The node can take links now. `arena`: the source of what is written to peers."""
        self._facts = facts
        self._messenger = messenger
        self._fabric = fabric
        self._counters = counters
        self._arena = arena

    def stop(self) -> None:
        """Take no new link."""
        self._facts = None

    async def _challenge(self, request: web.Request) -> web.Response:
        try:
            body = await read_body(request.content)
            reply = self._responder.challenge(body, secrets.token_bytes(NONCE_BYTES), time.monotonic())
        except ProtocolError as error:
            return self._refused(request, 400, error.message)
        return _answer(reply)

    async def _hello(self, request: web.Request) -> web.Response:
        if self._facts is None:
            return web.Response(status=503, text="not ready for hellos", headers={"Retry-After": "1"})
        try:
            body = await read_body(request.content)
            verified = self._responder.verify(body, time.monotonic())
        except ProtocolError as error:
            return self._refused(request, 400, error.message)
        except HelloRefused as error:
            return self._refused(request, 403, error.message)
        reason = unfit(self._facts, verified.facts)
        if reason is not None:
            self._tell(f"{verified.facts.node.node_id}: {reason}")
            return _answer(verified.refuse(reason))
        peer = verified.facts.node.node_id
        if peer in self._busy:
            return web.Response(status=503, text="another hello of this node is under way")
        self._busy.add(peer)
        try:
            return await self._accept(verified)
        except FabricError as error:
            self.hellos["failed"] += 1
            log.error("cannot open a port for %s: %s", peer, error)
            return web.Response(status=503, text=f"cannot open a port: {error}"[:300])
        finally:
            self._busy.discard(peer)

    async def _accept(self, verified: Verified) -> web.Response:
        """The newest hello of a node wins: its older links are closed before the new one's port opens."""
        peer = verified.facts.node
        while (old := self._messenger.link_of(peer.node_id)) is not None:
            old.lost(PeerLost(f"{peer.node_id} has said hello again"))
            await old.closed.wait()
        port = await PeerPort.open(self._fabric, self._counters, self._arena, name=peer.node_id)
        try:
            facts = self._facts
            if facts is None:
                raise FabricError("the node is shutting down")
            ours = port.facts(facts, self._fabric, offer_memory=False)
            reply, session = verified.accept(ours, secrets.randbits(64))
            link = FabricLink(
                port,
                session,
                ours,
                on_message=self._messenger.message_received,
                on_lost=self._messenger.link_lost,
            )
        except BaseException:
            await port.close()
            raise
        self.hellos["accepted"] += 1
        log.info("linked to decode node %s", peer.node_id)
        self._messenger.link_up(link)
        return _answer(reply)

    def _refused(self, request: web.Request, status: int, reason: str) -> web.Response:
        self._tell(f"{request.remote}: {reason}")
        return web.Response(status=status, text=reason)

    def _tell(self, what: str) -> None:
        """Count a refusal; log each kind once."""
        self.hellos["refused"] += 1
        if what not in self._told and len(self._told) < 256:
            self._told.add(what)
            log.warning("refused a hello from %s", what)


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type=CONTENT_TYPE)
