"""The scheduler under random requests, cancels, peers, overlapped steps; and faults that must be caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdserve.engine.batch import Batch
from pdserve.engine.limits import Role
from pdserve.engine.pages import PageAllocator
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.step import StepBuilder
from tests.engine.scheduler_machine import BothMachine, DecodeMachine, PrefillMachine, SchedulerMachine

for _machine in (PrefillMachine, DecodeMachine, BothMachine):
    _machine.TestCase.settings = settings(
        max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
    )

TestPrefill = PrefillMachine.TestCase
TestDecode = DecodeMachine.TestCase
TestBoth = BothMachine.TestCase


class Life:
    """A long random life in realistic proportions, from a seed. Hypothesis' own runs are short but shrink."""

    def __init__(self, machine: SchedulerMachine, random: Random) -> None:
        self.machine = machine
        self.random = random
        machine.start(
            page_size=random.choice([1, 2, 3, 4, 8]),
            num_pages=random.randint(6, 40),
            max_num_seqs=random.randint(1, 6),
            budget=random.randint(0, 24),
            max_model_len=random.randint(8, 60),
            max_waiting=random.randint(2, 12),
            steps_in_flight=random.randint(1, 3),
            max_receiving=random.choice([None, 1, 3]),
        )

    def run(self, calls: int) -> None:
        weights: dict[Callable[[], None], int] = {
            self.submit: 6,
            self.machine.admit: 4,
            self.machine.publish: 8,
            self.step: 16,
            lambda: self.machine.cancel(self.pick()): 1,
            lambda: self.machine.late_news(self.pick()): 1,
            lambda: self.machine.turn(self.random.randint(1, 6)): 1,
            lambda: self.machine.pass_time(self.random.uniform(0, 5)): 1,
        }
        if self.machine.role is Role.DECODE:
            weights[lambda: self.machine.peer_writes(self.pick(), self.pick())] = 4
            weights[lambda: self.machine.receive(self.pick())] = 4
            weights[lambda: self.machine.give_up(self.pick())] = 1
            weights[lambda: self.machine.prove_safe(self.pick())] = 2
        elif self.machine.role is Role.PREFILL:
            weights[lambda: self.machine.read_source(self.pick())] = 2
            weights[lambda: self.machine.release(self.pick())] = 2
        for call in self.random.choices(list(weights), list(weights.values()), k=calls):
            call()
            self.machine.all_agree()
            self.machine.plans_tell_everything()
            self.machine.nothing_named_is_reused()
            self.machine.tokens_are_as_expected()
        self.machine.teardown()

    def pick(self) -> int:
        return self.random.getrandbits(16)

    def step(self) -> None:
        if self.machine.to_run and self.random.random() < 0.5:
            self.machine.run()
        elif self.machine.to_report:
            self.machine.complete()

    def submit(self) -> None:
        random = self.random
        self.machine.submit(
            shape=random.choice(["one", "page-1", "page", "page+1", "full", "any", "any"]),
            any_length=random.randint(1, 30),
            output=random.choice([1, 2, 3, 7, 12, 99]),
            oversize=random.random() < 0.05,
            eos_at=random.choice([None, random.randint(0, 8)]),
            min_tokens=random.choice([0, 0, 0, 1, 3]),
            priority=random.choice([0, 0, 0, -1, 1]),
            patience=random.choice([None, random.uniform(0.5, 40)]),
        )


@pytest.mark.parametrize("machine", [PrefillMachine, DecodeMachine, BothMachine])
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_long_lives(machine: type[SchedulerMachine], seed: int) -> None:
    Life(machine(), Random(seed)).run(calls=400)


def release_ignores_the_step(patch: pytest.MonkeyPatch) -> None:
    original = PageAllocator.release

    def release(self: PageAllocator, pages: Sequence[int], last_step: int) -> None:
        original(self, pages, -1)

    patch.setattr(PageAllocator, "release", release)
    patch.setattr(Scheduler, "check", lambda self: None)


def quarantine_is_skipped(patch: pytest.MonkeyPatch) -> None:
    def quarantine(self: PageAllocator, pages: Sequence[int]) -> None:
        self.received(pages)
        self.release(pages, -1)

    patch.setattr(PageAllocator, "quarantine", quarantine)
    patch.setattr(PageAllocator, "safe", lambda self, pages, last_step=-1: None)
    patch.setattr(Scheduler, "check", lambda self: None)


def chunks_end_anywhere(patch: pytest.MonkeyPatch) -> None:
    original = StepBuilder.__init__

    def init(self: StepBuilder, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self._budget -= 1

    patch.setattr(StepBuilder, "__init__", init)
    patch.setattr(StepBuilder, "whole_pages", lambda self, end: end)


def a_new_page_is_not_told(patch: pytest.MonkeyPatch) -> None:
    original = StepBuilder._add

    def add(self: StepBuilder, request: Request, count: int, sample: bool, more: list[int]) -> None:
        original(self, request, count, sample, [])

    patch.setattr(StepBuilder, "_add", add)


def one_token_too_few_is_received(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.received

    def received(self: Scheduler, id: str, now: float) -> bool:
        wanted = original(self, id, now)
        request = self.get(id)
        if request is not None:
            request.scheduled += 1
        return wanted

    patch.setattr(Scheduler, "received", received)


def ended_sequences_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Batch, "tell", lambda self: self._untold.clear() or [])


def the_newest_goes_first(patch: pytest.MonkeyPatch) -> None:
    original = Batch.fill

    def fill(self: Batch, step: StepBuilder) -> None:
        self._prefilling = dict(reversed(self._prefilling.items()))
        original(self, step)

    patch.setattr(Batch, "fill", fill)


@pytest.mark.parametrize(
    ("fault", "machine"),
    [
        (release_ignores_the_step, BothMachine),
        (release_ignores_the_step, DecodeMachine),
        (release_ignores_the_step, PrefillMachine),
        (quarantine_is_skipped, DecodeMachine),
        (chunks_end_anywhere, PrefillMachine),
        (a_new_page_is_not_told, BothMachine),
        (one_token_too_few_is_received, DecodeMachine),
        (ended_sequences_are_not_told, BothMachine),
        (the_newest_goes_first, BothMachine),
    ],
)
def test_a_planted_fault_is_caught(
    fault: Callable[[pytest.MonkeyPatch], None],
    machine: type[SchedulerMachine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(20):
            Life(machine(), Random(seed)).run(calls=400)
