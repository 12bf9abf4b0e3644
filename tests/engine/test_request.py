"""The table of phases."""

from __future__ import annotations

import pytest

from pdserve.engine.request import TRANSITIONS, Phase, Request, TransitionError
from pdserve.engine.sampling import SamplingParams


def request(phase: Phase = Phase.WAITING) -> Request:
    return Request(id="r", seq=0, prompt=[1, 2], sampling=SamplingParams(), max_tokens=4, phase=phase)


def test_every_phase_can_be_reached_and_ends() -> None:
    reached = {Phase.WAITING}
    for _ in Phase:
        reached |= {target for (source, _), target in TRANSITIONS.items() if source in reached}
    assert reached == set(Phase)
    ending = {Phase.FINISHED}
    for _ in Phase:
        ending |= {source for (source, _), target in TRANSITIONS.items() if target in ending}
    assert ending == set(Phase)


def test_finished_is_final() -> None:
    assert not [source for source, _ in TRANSITIONS if source is Phase.FINISHED]


def test_no_way_from_exposed_pages_to_the_end_without_proof() -> None:
    """A peer may write from RECEIVING on: only `received` and `pages_safe` say that it no longer does."""
    for (source, event), target in TRANSITIONS.items():
        if source in (Phase.RECEIVING, Phase.QUARANTINED):
            assert target in (Phase.RECEIVING, Phase.QUARANTINED) or event in ("received", "pages_safe")


def test_a_cancel_is_possible_in_every_phase_of_either_kind() -> None:
    generate = set(Phase) - {Phase.FINISHED, Phase.SENDING}
    assert {source for source, event in TRANSITIONS if event == "cancel"} == generate
    prefill_only = {Phase.WAITING, Phase.RUNNING, Phase.SENDING}
    assert {source for source, event in TRANSITIONS if event == "cancel_compute"} == prefill_only


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("event", sorted({event for _, event in TRANSITIONS}))
def test_advance_follows_the_table_or_changes_nothing(phase: Phase, event: str) -> None:
    subject = request(phase)
    target = TRANSITIONS.get((phase, event))
    if target is not None:
        assert subject.advance(event) is target
        assert subject.phase is target
        return
    with pytest.raises(TransitionError, match=rf"r: {event} .* phase {phase.value}"):
        subject.advance(event)
    assert subject.phase is phase


@pytest.mark.parametrize(("scheduled", "planned"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_samples_planned_counts_from_the_last_prompt_token(scheduled: int, planned: int) -> None:
    subject = request()
    subject.scheduled = scheduled
    assert subject.samples_planned == planned
