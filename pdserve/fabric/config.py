"""What a fabric is opened with, and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdserve.errors import ConfigError

Mode = Literal["auto", "thread", "inline"]

_RANGES = {
    "recv_buffers": (1, 4096),
    "recv_size": (64, 1 << 24),
    "max_inflight_writes": (1, 4096),
    "max_inflight_sends": (1, 1024),
    "post_quantum": (0, 4096),
    "max_outstanding": (1024, 1 << 22),
    "dead_after_s": (0.1, 3600.0),
}


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """Settings of one fabric. Out-of-range values raise ConfigError with the field, the value and the limits.

    provider: libfabric's name; "auto" is "tcp". host: the local address to bind, which peers must be able to
    reach. mode: who moves data: "thread", a native thread; "inline", the event loop in small turns; "auto",
    thread for tcp. library: path of libfabric, or None to look it up. recv_buffers x recv_size: messages that
    can wait for Python, a port; recv_size bounds a message both ways, so both sides must agree on it.
    max_inflight_writes, max_inflight_sends: posted and not yet completed, a port. post_quantum: posts in one
    turn; 0 picks 64 for thread and 16 for inline. max_outstanding: operations and receive buffers of all
    ports together; one more is refused. dead_after_s: a peer that takes nothing for this long, with nothing
    in flight, is lost. cpu: where to pin the native thread.
    """

    provider: str = "tcp"
    host: str = "127.0.0.1"
    mode: Mode = "auto"
    library: str | None = None
    recv_buffers: int = 64
    recv_size: int = 16384
    max_inflight_writes: int = 64
    max_inflight_sends: int = 16
    post_quantum: int = 0
    max_outstanding: int = 1 << 16
    dead_after_s: float = 5.0
    cpu: int | None = None

    def __post_init__(self) -> None:
        for field, (low, high) in _RANGES.items():
            value = getattr(self, field)
            if not low <= value <= high:
                raise ConfigError(
                    f"fabric.{field}: {value} is outside {low}..{high}", param=f"fabric.{field}"
                )
        if self.mode not in ("auto", "thread", "inline"):
            raise ConfigError(
                f"fabric.mode: {self.mode!r} is not auto, thread or inline", param="fabric.mode"
            )
        if "ofi_rxm" in self.provider and "tcp" in self.provider:
            raise ConfigError(
                f"fabric.provider: {self.provider!r} is refused: a killed sender crashes its receiver there; "
                "use 'tcp'",
                param="fabric.provider",
            )
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(
                f"fabric.host: {self.host!r} is no address that a peer can reach; name one of this machine's",
                param="fabric.host",
            )
        if self.cpu is not None and not 0 <= self.cpu < 1024:
            raise ConfigError(f"fabric.cpu: {self.cpu} is outside 0..1023", param="fabric.cpu")

    @property
    def provider_name(self) -> str:
        return "tcp" if self.provider == "auto" else self.provider

    @property
    def threaded(self) -> bool:
        """tcp copies on the CPU, up to 40 ms at a stretch: that belongs on a thread of its own."""
        return self.mode != "inline"

    @property
    def completions(self) -> int:
        """Entries of a port's completion queue: all it can have under way, and room for the peer's
        immediates."""
        return self.recv_buffers + self.max_inflight_writes + self.max_inflight_sends + 1024

    @property
    def quantum(self) -> int:
        return self.post_quantum or (64 if self.threaded else 16)


@dataclass(frozen=True, slots=True)
class ProviderInfo:
    """What libfabric offered. Sizes in bytes; `mr_mode` as in fi_mr(3): 0 means remote addresses are offsets
    and the application picks the keys."""

    provider: str
    fabric: str
    domain: str
    version: str
    path: str
    mode: Literal["thread", "inline"]
    mr_mode: int
    max_message: int
    max_write: int
    cq_data_size: int
    address_format: int
