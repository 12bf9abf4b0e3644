"""The worker's persistent batch: what it knows of each sequence between plans."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.plan import NewSequence, Plan, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.errors import WorkerError
from pdserve.layers.attention import cut_tiles
from pdserve.layers.step import StepBatch


class GrowingArray:
    """An int64 array that is appended to; doubles its room."""

    def __init__(self, items: list[int]) -> None:
        self._room = np.array(items, dtype=np.int64)
        self._length = len(items)

    def __len__(self) -> int:
        return self._length

    @property
    def view(self) -> NDArray[np.int64]:
        return self._room[: self._length]

    def extend(self, items: list[int]) -> None:
        end = self._length + len(items)
        if end > len(self._room):
            grown = np.zeros(max(end, 2 * len(self._room), 16), dtype=np.int64)
            grown[: self._length] = self.view
            self._room = grown
        self._room[self._length : end] = items
        self._length = end


class Sequence:
    """One sequence: its tokens (sampled ones are appended here), its page table, how it is sampled."""

    def __init__(self, new: NewSequence) -> None:
        self.seq = new.seq
        self.tokens = GrowingArray(new.tokens)
        self.pages = GrowingArray(new.pages)
        self.prompt_len = new.prompt_len
        self.sampling: SamplingParams | None = new.sampling


class PersistentBatch:
    """Applies plans, lays out steps, owns the sequences; a plan that contradicts them: `WorkerError`."""

    def __init__(self, *, num_pages: int, page_size: int, max_model_len: int) -> None:
        self.sequences: dict[int, Sequence] = {}
        self._num_pages = num_pages
        self._page_size = page_size
        self._max_model_len = max_model_len

    def apply(self, plan: Plan) -> None:
        """Forget, learn, extend: in that order, so that an id may be used again at once."""
        for seq in plan.finished:
            self.sequences.pop(seq, None)
        for new in plan.new:
            if new.seq in self.sequences:
                raise WorkerError(f"step {plan.step}: sequence {new.seq} is already in the batch")
            self._check_pages(plan.step, new.seq, new.pages)
            self.sequences[new.seq] = Sequence(new)
        for more in plan.pages:
            self._check_pages(plan.step, more.seq, more.pages)
            self._find(plan.step, more.seq).pages.extend(more.pages)

    def lay_out(self, plan: Plan) -> StepBatch:
        """Flatten the plan's work into rows, in its order."""
        sequences = [self._find(plan.step, work.seq) for work in plan.work]
        for work, sequence in zip(plan.work, sequences, strict=True):
            self._check_work(plan.step, work, sequence)
        total = sum(work.count for work in plan.work)
        width = max((len(sequence.pages) for sequence in sequences), default=1)
        tokens, positions, owners = (np.empty(total, np.int64) for _ in range(3))
        tables = np.zeros((len(sequences), width), np.int64)
        spans: list[tuple[int, int, int, int]] = []
        sampled: list[int] = []
        row = 0
        for index, (work, sequence) in enumerate(zip(plan.work, sequences, strict=True)):
            end = row + work.count
            tokens[row:end] = sequence.tokens.view[work.start : work.start + work.count]
            positions[row:end] = np.arange(work.start, work.start + work.count)
            owners[row:end] = index
            tables[index, : len(sequence.pages)] = sequence.pages.view
            spans.append((row, work.count, work.start, index))
            if work.sample:
                sampled.append(end - 1)
            row = end
        return StepBatch(
            tokens=tokens,
            positions=positions,
            pages=tables[owners, positions // self._page_size],
            slots=positions % self._page_size,
            tables=tables,
            tiles=cut_tiles(spans),
            sampled=np.array(sampled, np.int64),
        )

    def _find(self, step: int, seq: int) -> Sequence:
        try:
            return self.sequences[seq]
        except KeyError:
            raise WorkerError(f"step {step}: sequence {seq} is not in the batch") from None

    def _check_pages(self, step: int, seq: int, pages: list[int]) -> None:
        for page in pages:
            if not 0 < page < self._num_pages:
                raise WorkerError(
                    f"step {step}: sequence {seq}: page {page} is not in [1, {self._num_pages})"
                )

    def _check_work(self, step: int, work: Work, sequence: Sequence) -> None:
        end = work.start + work.count
        problem = ""
        if work.start < 0 or work.count < 1:
            problem = f"nothing to compute at {work.start} + {work.count}"
        elif end > len(sequence.tokens):
            problem = f"position {end - 1} is past its {len(sequence.tokens)} known tokens"
        elif end > len(sequence.pages) * self._page_size:
            problem = f"position {end - 1} is past its {len(sequence.pages)} pages of {self._page_size}"
        elif end > self._max_model_len:
            problem = f"position {end - 1} is past the model length {self._max_model_len}"
        elif work.sample and sequence.sampling is None:
            problem = "it has no sampling parameters, so it can't be sampled"
        if problem:
            raise WorkerError(f"step {step}: sequence {work.seq}: {problem}")
