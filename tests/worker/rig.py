"""A model runner with an arena, a page allocator that scatters, and a record of logits and ticks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.plan import MorePages, NewSequence, Plan, SequenceOutput, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.models.llama import LlamaModel
from pdserve.models.loader import kv_page_bytes, load_model
from pdserve.worker.runner import ModelRunner

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Rig:
    """One rank. `logits[(seq, position)]`: raw logits after the token at `position`, copied."""

    def __init__(
        self,
        model: LlamaModel | Path,
        *,
        page_size: int = 16,
        num_pages: int = 64,
        kv_dtype: str = "float32",
        max_model_len: int = 512,
        seed: int = 0,
    ) -> None:
        self.model = load_model(model) if isinstance(model, Path) else model
        self.page_size = page_size
        self.num_pages = num_pages
        size = self.model.num_layers * num_pages * kv_page_bytes(self.model.card, page_size, kv_dtype)
        self.arena = bytearray(size)
        self.logits: dict[tuple[int, int], NDArray[np.float32]] = {}
        self.ticks: list[int] = []
        self.tables: dict[int, list[int]] = {}
        self._free = [int(page) for page in np.random.default_rng(seed).permutation(num_pages - 1) + 1]
        self._work: list[Work] = []
        self._steps = 0
        self.runner = ModelRunner(
            self.model,
            self.arena,
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=16,
            max_num_batched_tokens=64,
            max_model_len=max_model_len,
            batch_invariant=True,
            kv_dtype=kv_dtype,
            on_layer=self.ticks.append,
            on_logits=self._record,
        )

    def new(
        self,
        seq: int,
        tokens: list[int],
        sampling: SamplingParams | None = GREEDY,
        *,
        prompt_len: int | None = None,
        room: int = 0,
    ) -> NewSequence:
        """Give it pages for its tokens and `room` more."""
        count = -(-(len(tokens) + room) // self.page_size)
        self.tables[seq] = [self._free.pop() for _ in range(count)]
        prompt = len(tokens) if prompt_len is None else prompt_len
        return NewSequence(seq, tokens, prompt, list(self.tables[seq]), sampling)

    def more(self, seq: int) -> MorePages:
        page = self._free.pop()
        self.tables[seq].append(page)
        return MorePages(seq, [page])

    def step(
        self,
        *work: Work,
        new: list[NewSequence] | None = None,
        pages: list[MorePages] | None = None,
        finished: list[int] | None = None,
    ) -> list[SequenceOutput]:
        for seq in finished or []:
            self._free.extend(self.tables.pop(seq, []))
        self._work = [item for item in work if item.sample]
        plan = Plan(self._steps, new or [], pages or [], finished or [], list(work))
        self._steps += 1
        return self.runner.execute(plan)

    def force(self, seq: int, tokens: list[int], chunks: list[int]) -> NDArray[np.float32]:
        """Compute a known text in these chunks; the logits after each chunk [chunks, vocab]."""
        self.step(new=[self.new(seq, tokens)])
        start, rows = 0, []
        for count in chunks:
            self.step(Work(seq, start, count, True))
            start += count
            rows.append(self.logits[seq, start - 1])
        return np.stack(rows)

    def kv(self, seq: int, tokens: int) -> bytes:
        """The sequence's K and V in token order, [layer][token][head][K|V][dim], as bytes."""
        card = self.model.card
        item = len(self.arena) // (
            self.model.num_layers * self.num_pages * card.num_kv_heads * 2 * self.page_size * card.head_dim
        )
        shape = (self.model.num_layers, self.num_pages, card.num_kv_heads, 2, self.page_size, card.head_dim)
        arena = np.frombuffer(self.arena, {2: np.uint16, 4: np.uint32}[item]).reshape(shape)
        held = arena[:, self.tables[seq]].transpose(0, 1, 4, 2, 3, 5)
        return held.reshape(shape[0], -1, shape[2], 2, shape[5])[:, :tokens].tobytes()

    def _record(self, seqs: list[int], logits: NDArray[np.float32]) -> None:
        assert seqs == [work.seq for work in self._work]
        for work, row in zip(self._work, logits, strict=True):
            self.logits[work.seq, work.start + work.count - 1] = row.copy()
