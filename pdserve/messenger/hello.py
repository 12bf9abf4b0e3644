"""Hello: two HTTP round trips after which two nodes know each other and share a session key.

    initiator (decode)                              responder (prefill)
    Challenge(nonce_i)                        ->
                                              <-    ChallengeReply(nonce_r)
    Hello(nonce_i, nonce_r, facts_i, proof_i) ->
                                              <-    HelloReply(link, facts_r, proof_r)   or HelloRefusal

A proof is BLAKE2b, keyed by the cluster secret, over a label and everything said so far. Both nonces are in
both proofs, so neither can be replayed; labels differ, so neither can be reflected. The session key is keyed
by the secret over the whole transcript. Nothing of this is encrypted: where the network is not trusted, HTTP
runs over TLS (whoever reads hello learns a port's address and key, the only secrets of an arena).

Before a caller has proved that it knows the secret, the responder keeps one nonce in a bounded table for it,
and opens nothing. Nonces and link ids are drawn by the shell, from the system's random source.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, TypeVar

import msgspec

from pdserve.errors import HelloRefused, ProtocolError
from pdserve.messenger.facts import U64, HelloFacts
from pdserve.messenger.messages import PROTOCOL_VERSION

NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_BODY = 1 << 20

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, msgspec.Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Facts = Annotated[bytes, msgspec.Meta(max_length=MAX_BODY)]


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: Nonce
    version: int = PROTOCOL_VERSION


class ChallengeReply(msgspec.Struct, frozen=True, array_like=True, tag="challenge_reply"):
    nonce: Nonce
    version: int = PROTOCOL_VERSION


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """`facts`: encoded HelloFacts. They travel as bytes because proofs are over bytes."""

    initiator_nonce: Nonce
    responder_nonce: Nonce
    facts: Facts
    proof: Proof


class HelloReply(msgspec.Struct, frozen=True, array_like=True, tag="hello_reply"):
    link: U64
    facts: Facts
    proof: Proof


class HelloRefusal(msgspec.Struct, frozen=True, array_like=True, tag="hello_refusal"):
    """The responder trusts the caller and will not have it. The proof tells it from a stranger's."""

    reason: Annotated[str, msgspec.Meta(max_length=1024)]
    proof: Proof


@dataclass(frozen=True)
class Session:
    """What hello yields. `key` authenticates the link's datagrams; it is not to be logged."""

    link: int
    key: bytes
    peer: HelloFacts
    initiator: bool

    def __repr__(self) -> str:
        return f"Session({self.link:016x}, {self.peer.node.node_id!r})"


class _Secret:
    """The cluster secret, as a BLAKE2b key of fixed size."""

    def __init__(self, secret: bytes) -> None:
        if not secret:
            raise HelloRefused("the cluster secret is empty", code="bad_secret")
        self._key = blake2b(secret, digest_size=64, person=b"pdserve secret").digest()

    def digest(self, label: str, *parts: bytes) -> bytes:
        """Keyed hash of a label and parts, each with its length, so that no two lists look alike."""
        state = blake2b(label.encode(), digest_size=PROOF_BYTES, key=self._key, person=b"pdserve hello")
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()


class Initiator:
    """One hello from the caller's side; use once. `nonce`: NONCE_BYTES fresh random bytes."""

    def __init__(self, secret: bytes, nonce: bytes) -> None:
        self._secret = _Secret(secret)
        self._nonce = nonce
        self._said: tuple[bytes, ...] = ()

    def challenge(self) -> bytes:
        """Body of the first request."""
        return msgspec.msgpack.encode(Challenge(self._nonce))

    def hello(self, reply: bytes, facts: HelloFacts) -> bytes:
        """Body of the second request, from the first one's reply. Raises ProtocolError."""
        theirs = _read(reply, ChallengeReply)
        encoded = msgspec.msgpack.encode(facts)
        self._said = (self._nonce, theirs.nonce, encoded)
        proof = self._secret.digest("initiator", *self._said)
        return msgspec.msgpack.encode(Hello(self._nonce, theirs.nonce, encoded, proof))

    def finish(self, reply: bytes) -> Session:
        """The session, from the second request's reply.

        Raises HelloRefused with the responder's reason, or with code "bad_secret" where the responder did not
        prove that it knows the secret. Whether its facts fit is the caller's to check (`facts.unfit`).
        """
        answer = _read(reply, HelloReply | HelloRefusal)  # type: ignore[arg-type]
        if isinstance(answer, HelloRefusal):
            expected = self._secret.digest("refusal", *self._said, answer.reason.encode())
            _check_proof(expected, answer.proof, "responder")
            raise HelloRefused(answer.reason)
        assert isinstance(answer, HelloReply)
        said = (*self._said, answer.link.to_bytes(8, "little"), answer.facts)
        _check_proof(self._secret.digest("responder", *said), answer.proof, "responder")
        facts = _read(answer.facts, HelloFacts)
        return Session(answer.link, self._secret.digest("session", *said), facts, initiator=True)


@dataclass(frozen=True)
class Verified:
    """A caller that knows the secret, and what it says of itself. Answer it with `accept` or `refuse`."""

    facts: HelloFacts
    _secret: _Secret
    _said: tuple[bytes, ...]

    def accept(self, facts: HelloFacts, link: int) -> tuple[bytes, Session]:
        """Body of the reply, and our side of the session. `link`: a fresh random 64-bit id."""
        encoded = msgspec.msgpack.encode(facts)
        said = (*self._said, link.to_bytes(8, "little"), encoded)
        reply = HelloReply(link, encoded, self._secret.digest("responder", *said))
        session = Session(link, self._secret.digest("session", *said), self.facts, initiator=False)
        return msgspec.msgpack.encode(reply), session

    def refuse(self, reason: str) -> bytes:
        """Body of a reply that says why not."""
        reason = reason[:1024]
        proof = self._secret.digest("refusal", *self._said, reason.encode())
        return msgspec.msgpack.encode(HelloRefusal(reason, proof))


class Responder:
    """The server's side of all hellos. Keeps at most `max_nonces` open challenges, each for `lifetime_s`;
    when the table is full the oldest is forgotten (its caller starts over)."""

    def __init__(self, secret: bytes, *, max_nonces: int = 1024, lifetime_s: float = 30.0) -> None:
        self._secret = _Secret(secret)
        self._max_nonces = max_nonces
        self._lifetime = lifetime_s
        self._open: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    @property
    def open_challenges(self) -> int:
        return len(self._open)

    def challenge(self, body: bytes, nonce: bytes, now: float) -> bytes:
        """The reply to a first request. `nonce`: NONCE_BYTES fresh random bytes. Raises ProtocolError."""
        theirs = _read(body, Challenge)
        self._expire(now)
        while len(self._open) >= self._max_nonces:
            self._open.popitem(last=False)
        self._open[nonce] = (theirs.nonce, now + self._lifetime)
        return msgspec.msgpack.encode(ChallengeReply(nonce))

    def verify(self, body: bytes, now: float) -> Verified:
        """The caller behind a second request, if it knows the secret; its challenge is spent either way.

        Raises ProtocolError (unreadable) or HelloRefused with code "bad_nonce" (unknown, spent or expired) or
        "bad_secret".
        """
        hello = _read(body, Hello)
        self._expire(now)
        challenged, _ = self._open.pop(hello.responder_nonce, (b"", 0.0))
        if not hmac.compare_digest(challenged, hello.initiator_nonce):
            raise HelloRefused("hello without an open challenge: ask for a new one", code="bad_nonce")
        said = (hello.initiator_nonce, hello.responder_nonce, hello.facts)
        _check_proof(self._secret.digest("initiator", *said), hello.proof, "caller")
        return Verified(_read(hello.facts, HelloFacts), self._secret, said)

    def _expire(self, now: float) -> None:
        while self._open:
            nonce, (_, expiry) = next(iter(self._open.items()))
            if expiry > now:
                return
            del self._open[nonce]


T = TypeVar("T")


def _read(body: bytes, kind: type[T]) -> T:
    if len(body) > MAX_BODY:
        raise ProtocolError(f"hello of {len(body)} bytes; the limit is {MAX_BODY}")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"unreadable hello: {str(error)[:200]}") from None


def _check_proof(expected: bytes, proof: bytes, who: str) -> None:
    if not hmac.compare_digest(expected, proof):
        raise HelloRefused(f"the {who} does not know the cluster secret", code="bad_secret")
