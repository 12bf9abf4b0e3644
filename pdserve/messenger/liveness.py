"""Whether a peer lives, in a time that stands still while this process does.

A peer is dead to us when it has been silent for `dead_s` beyond the beat in which a living one may be silent
too, or when it has not echoed a beat of ours for as long although we sent some: a path that carries one
direction only is no path. So a peer that is stopped for less than `dead_s` is never dead to us. An echo comes
with the peer's next beat, and after a stop with the one after that: the first may leave before ours are read.

A process that was stopped, or whose loop was blocked, sees its own clock jump; it can't tell what its peers
did meanwhile, so that time does not count against them.
"""

from __future__ import annotations

from pdserve.messenger.messages import Heartbeat, Load


class OwnTime:
    """Monotonic seconds less those in which we were paused: a gap between two calls longer than `pause_s`.

    Its user must call at least every `pause_s` while it waits for anything, which heartbeats see to.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._last: float | None = None
        self.paused = 0.0
        self.pauses = 0

    def at(self, now: float) -> float:
        """Own time at `now`, which never goes back."""
        last = self._last if self._last is not None else now
        if now - last > self._pause_s:
            self.paused += now - last
            self.pauses += 1
        self._last = max(last, now)
        return self._last - self.paused


class Liveness:
    """Heartbeats of one link, in own time."""

    def __init__(self, heartbeat_s: float, dead_s: float, now: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._silent_s = heartbeat_s + dead_s
        self._unechoed_s = 2 * heartbeat_s + dead_s
        self.next_beat = now
        self._heard = now
        self._beat = 0
        self._echoed = 0
        self._unechoed_since: float | None = None
        self._last_beat_heard = 0

    def sign(self, now: float) -> None:
        """Any message or immediate of the peer's."""
        self._heard = now

    def received(self, beat: Heartbeat, now: float) -> None:
        self.sign(now)
        self._last_beat_heard = max(self._last_beat_heard, beat.beat)
        if beat.echo > self._echoed:
            self._echoed = beat.echo
            self._unechoed_since = now if beat.echo < self._beat else None

    def beat(self, load: Load, now: float) -> Heartbeat:
        """The heartbeat to send now."""
        self._beat += 1
        self.next_beat = now + self._heartbeat_s
        if self._unechoed_since is None:
            self._unechoed_since = now
        return Heartbeat(self._beat, self._last_beat_heard, load)

    def verdict(self, now: float) -> str | None:
        """Why the peer is dead to us, or None."""
        if now - self._heard > self._silent_s:
            return f"nothing heard for {now - self._heard:.1f} s"
        if self._unechoed_since is not None and now - self._unechoed_since > self._unechoed_s:
            return f"no echo of our heartbeats for {now - self._unechoed_since:.1f} s"
        return None
