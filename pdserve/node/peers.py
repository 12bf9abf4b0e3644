"""Hello from the decode side: one coroutine a prefill node, which keeps a link to it alive.

A lost link is fenced by the messenger; when its port is closed the coroutine says hello again, for as long as
the node runs. A peer that refuses is asked again too, seldom: it may be restarted with another model.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import aiohttp

from pdserve.errors import HelloRefused, PdserveError, PeerError, ProtocolError
from pdserve.fabric import Fabric, ImmCounters
from pdserve.messenger.facts import NodeFacts, unfit
from pdserve.messenger.hello import MAX_BODY, NONCE_BYTES, Initiator, Session
from pdserve.node.decode_messenger import DecodeMessenger
from pdserve.node.links import FabricLink, PeerPort

log = logging.getLogger(__name__)

CHALLENGE_PATH = "/pd/v1/challenge"
HELLO_PATH = "/pd/v1/hello"
CONTENT_TYPE = "application/msgpack"

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0
_REFUSED_RETRY_S = 5.0
_HELLO_TIMEOUT = aiohttp.ClientTimeout(total=10)


class PeerConnection:
    """Keeps this decode node linked to the prefill node at one URL."""

    def __init__(
        self,
        url: str,
        secret: bytes,
        facts: NodeFacts,
        messenger: DecodeMessenger,
        fabric: Fabric,
        counters: ImmCounters,
        arena: memoryview,
        http: aiohttp.ClientSession,
        on_change: Callable[[], None],
    ) -> None:
        """`arena`: what the peer may write to. `on_change`: a link came or went (health)."""
        self.url = url
        self.link: FabricLink | None = None
        self.hellos: dict[str, int] = {"accepted": 0, "refused": 0, "failed": 0}
        self.problem: str | None = None
        """Why there is no link, as last heard."""
        self._secret = secret
        self._facts = facts
        self._messenger = messenger
        self._fabric = fabric
        self._counters = counters
        self._arena = arena
        self._http = http
        self._on_change = on_change
        self._again = asyncio.Event()

    @property
    def up(self) -> bool:
        return self.link is not None and not self.link.closed.is_set()

    def again(self) -> None:
        """Do not wait for the next retry."""
        self._again.set()

    async def run(self) -> None:
        """Until cancelled."""
        delay = _FIRST_RETRY_S
        while True:
            wait = await self._try()
            if wait is None:
                delay = _FIRST_RETRY_S
                wait = delay
            elif wait == 0.0:
                wait = delay
                delay = min(delay * 2, _LAST_RETRY_S)
            self._again.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._again.wait()
            except TimeoutError:
                pass

    async def _try(self) -> float | None:
        """One hello, and the link's life if it succeeds (None). Else how long to wait; 0.0: back off."""
        try:
            self.link = await self._hello()
        except HelloRefused as error:
            self._failed("refused", error.message)
            return _REFUSED_RETRY_S
        except (PdserveError, aiohttp.ClientError, OSError, TimeoutError) as error:
            self._failed("failed", str(error) or type(error).__name__)
            return 0.0
        self.problem = None
        self.hellos["accepted"] += 1
        log.info("linked to prefill node %s at %s", self.link.peer.node.node_id, self.url)
        self._on_change()
        await self.link.closed.wait()
        log.warning("link to the prefill node at %s is gone", self.url)
        self.link = None
        self._on_change()
        return None

    def _failed(self, outcome: str, problem: str) -> None:
        self.hellos[outcome] += 1
        if problem != self.problem:
            log.warning("no link to the prefill node at %s: %s", self.url, problem)
        self.problem = problem

    async def _hello(self) -> FabricLink:
        initiator = Initiator(self._secret, secrets.token_bytes(NONCE_BYTES))
        reply = await self._post(CHALLENGE_PATH, initiator.challenge())
        port = await PeerPort.open(self._fabric, self._counters, self._arena, name=self.url)
        try:
            ours = port.facts(self._facts, self._fabric, offer_memory=True)
            session = initiator.finish(await self._post(HELLO_PATH, initiator.hello(reply, ours)))
            reason = unfit(self._facts, session.peer) or self._taken(session)
            if reason is not None:
                raise HelloRefused(reason)
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
        self._messenger.link_up(link)
        return link

    def _taken(self, session: Session) -> str | None:
        """Why this link can't be told from one that is up. Our own former one is closed by now."""
        node_id = session.peer.node.node_id
        if session.link in self._messenger.links:
            return f"link id: {node_id} gave one that is in use"
        if self._messenger.link_of(node_id) is not None:
            return f"node id: another prefill node is called {node_id!r} too"
        return None

    async def _post(self, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": CONTENT_TYPE}
        async with self._http.post(
            self.url + path, data=body, headers=headers, timeout=_HELLO_TIMEOUT
        ) as response:
            answer = await read_body(response.content)
            if response.content_type == CONTENT_TYPE and response.status == 200:
                return answer
            text = answer[:300].decode(errors="replace")
            if response.status in (401, 403):
                raise HelloRefused(f"{path} was answered {response.status}: {text}", code="bad_secret")
            raise PeerError(f"{path} was answered {response.status}: {text}")


async def read_body(stream: aiohttp.StreamReader) -> bytes:
    """A hello's body, at most MAX_BODY bytes. Raises ProtocolError on a longer one, having read no more."""
    body = b""
    while chunk := await stream.read(MAX_BODY + 1 - len(body)):
        body += chunk
        if len(body) > MAX_BODY:
            raise ProtocolError(f"a hello of more than {MAX_BODY} bytes")
    return body
