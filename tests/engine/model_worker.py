"""A worker without a model: the persistent batch that plans alone describe, and an arena that shows misuse.

A cell of the arena (a page and an offset in it) holds who wrote it last, as (sequence, position). Computing a
position checks that all cells before it are the sequence's own, so a page that was reused too early, a wrong
page table, a gap or a late write of a peer shows up as a failed assertion, whoever is to blame.
"""

from __future__ import annotations

import dataclasses

from pdserve.engine.plan import Plan, SequenceOutput, StepResult

STOP = 1
"""The token that ends a sequence."""


@dataclasses.dataclass
class Row:
    tokens: list[int]
    prompt_len: int
    pages: list[int]
    computed: int | None = None
    """Positions computed; None until the first work says where the KV of others ends."""


class PersistentBatch:
    """What a worker knows after the plans so far. Legal plans only."""

    def __init__(self, page_size: int, max_num_seqs: int) -> None:
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.rows: dict[int, Row] = {}
        self.next_step = 0
        self.next_seq = 0

    def apply(self, plan: Plan) -> None:
        assert plan.step == self.next_step
        self.next_step += 1
        for seq in plan.finished:
            del self.rows[seq]
        for new in plan.new:
            assert new.seq not in self.rows
            assert len(new.tokens) >= new.prompt_len >= 1
            self.rows[new.seq] = Row(list(new.tokens), new.prompt_len, list(new.pages))
        for more in plan.pages:
            assert more.pages
            self.rows[more.seq].pages += more.pages
        assert len(self.rows) <= self.max_num_seqs
        assert len({work.seq for work in plan.work}) == len(plan.work)
        for work in plan.work:
            row = self.rows[work.seq]
            assert work.count >= 1
            assert row.computed in (None, work.start)
            row.computed = work.start + work.count
            assert row.computed <= len(row.pages) * self.page_size
            assert 0 not in row.pages
            assert len(set(row.pages)) == len(row.pages)
        assert all(row.computed is not None for row in self.rows.values()), "announced without work"


class ModelWorker:
    """Runs plans in order. `eos_at[seq]`: the index of the output from which every token is STOP."""

    def __init__(self, page_size: int, num_pages: int, max_num_seqs: int) -> None:
        self.batch = PersistentBatch(page_size, max_num_seqs)
        self.page_size = page_size
        self.cells: list[tuple[int, int] | None] = [None] * (num_pages * page_size)
        self.eos_at: dict[int, int] = {}

    def cell(self, pages: list[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def write(self, seq: int, pages: list[int], position: int) -> None:
        """Write the KV of one position, as a step or as a peer does."""
        self.cells[self.cell(pages, position)] = (seq, position)

    def expect(self, seq: int, pages: list[int], positions: int) -> None:
        """The KV of the first `positions` positions is there."""
        for position in range(positions):
            found = self.cells[self.cell(pages, position)]
            assert found == (seq, position), f"sequence {seq} position {position} holds {found}"

    def run(self, plan: Plan) -> StepResult:
        self.batch.apply(plan)
        outputs = []
        for work in plan.work:
            row = self.batch.rows[work.seq]
            end = work.start + work.count
            assert end <= len(row.tokens), "computes a token that nobody knows"
            for position in range(work.start, end):
                self.write(work.seq, row.pages, position)
        for work in plan.work:
            row = self.batch.rows[work.seq]
            end = work.start + work.count
            self.expect(work.seq, row.pages, end)
            if work.sample:
                assert end == len(row.tokens), "samples in the middle"
                index = end - row.prompt_len
                stop = index >= self.eos_at.get(work.seq, 1 << 30)
                token = STOP if stop else 100 + index
                row.tokens.append(token)
                outputs.append(SequenceOutput(work.seq, token))
        return StepResult(plan.step, outputs, 0, 0)
