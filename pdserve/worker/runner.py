"""The model runner: a plan in, sampled tokens out, a tick after each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.plan import NewSequence, Plan, SequenceOutput, Work
from pdserve.engine.sampling import SamplingParams
from pdserve.layers.attention import PagedCache
from pdserve.models.llama import LlamaModel
from pdserve.worker.batch import PersistentBatch
from pdserve.worker.sampler import Sampler

LogitsHook = Callable[[list[int], NDArray[np.float32]], None]


class ModelRunner:
    """Runs plans on one rank's model and arena, one after another, on one thread.

    `arena`: a writable buffer of at least `model.num_layers * num_pages * kv_page_bytes(...)` bytes, zeroed;
    the runner borrows it and keeps views of it until `close()`. Page 0 is scrap: no sequence may have it.
    `kv_dtype` is "float32" or "float16" ("auto" is resolved by `loader.resolve_kv_dtype`).

    `on_layer(l)` is called once layer l's K and V are in the arena and its attention output projection is
    done, `on_layer(num_layers)` after the final norm; also for a plan without work, never by `warm_up`.
    `on_logits(seqs, logits)` sees the raw logits [rows, vocab] of the sampled rows, in the order of the
    outputs; they are only valid during the call.

    `max_num_seqs` and `max_num_batched_tokens` only size the warm-up: the scheduler keeps the limits.
    `batch_invariant` asks for what the CPU kernels do always: the same bits for a row in any batch.
    """

    def __init__(
        self,
        model: LlamaModel,
        arena: Any,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        batch_invariant: bool,
        kv_dtype: str,
        on_layer: Callable[[int], None],
        on_logits: LogitsHook | None = None,
    ) -> None:
        card = model.card
        self._model = model
        self._cache = PagedCache(
            arena,
            layers=model.num_layers,
            pages=num_pages,
            kv_heads=card.num_kv_heads,
            page_size=page_size,
            head_dim=card.head_dim,
            dtype=kv_dtype,
        )
        self._num_pages = num_pages
        self._page_size = page_size
        self._warm_rows = max(1, min(max_num_batched_tokens, max_model_len, 64))
        self._max_model_len = max_model_len
        self._batch = PersistentBatch(num_pages=num_pages, page_size=page_size, max_model_len=max_model_len)
        self._sampler = Sampler(card.vocab_size)
        self._on_layer = on_layer
        self._on_logits = on_logits
        model.prepare(max_model_len)

    def execute(self, plan: Plan) -> list[SequenceOutput]:
        """Apply the plan to the persistent batch, compute, sample; outputs in the order of `plan.work`.

        A sampled token is appended to its sequence, so the next plan may compute it unseen. Where the token
        after the sampled position is known already (a reference is being forced), it is left as it is. Raises
        `WorkerError` for a plan that contradicts the batch, before anything is computed.
        """
        for seq in plan.finished:
            self._sampler.forget(seq)
        self._batch.apply(plan)
        return self._run(plan, self._on_layer, self._on_logits)

    def warm_up(self) -> None:
        """Compile every kernel and touch every weight, on the scrap page, which is zeroed again; no ticks."""
        rows = self._warm_rows
        scrap = [0] * -(-rows // self._page_size)
        batch = self._batch
        self._batch = PersistentBatch(
            num_pages=self._num_pages, page_size=self._page_size, max_model_len=self._max_model_len
        )
        try:
            for count in (1, rows):
                new = NewSequence(
                    seq=0, tokens=[0] * count, prompt_len=count, pages=[], sampling=_WARM_SAMPLING
                )
                work = [Work(seq=0, start=0, count=count, sample=True)]
                self._batch.apply(Plan(step=0, new=[new], pages=[], finished=[0], work=[]))
                self._batch.sequences[0].pages.extend(scrap)
                self._run(Plan(step=0, new=[], pages=[], finished=[], work=work), lambda _layer: None, None)
        finally:
            self._batch = batch
            self._sampler.forget(0)
            for layer in self._cache.layers:
                layer[0] = 0

    def close(self) -> None:
        """Drop every view of the arena, so that it can be unmapped. Nothing may be executed afterwards."""
        self._cache.layers.clear()

    def _run(
        self, plan: Plan, on_layer: Callable[[int], None], on_logits: LogitsHook | None
    ) -> list[SequenceOutput]:
        step = self._batch.lay_out(plan)
        hidden = self._model.forward(step, self._cache, on_layer)
        sampled = [work for work in plan.work if work.sample]
        if not sampled:
            return []
        logits = self._model.logits(hidden).numpy()
        if on_logits is not None:
            on_logits([work.seq for work in sampled], logits)
        return [self._sample(work, row) for work, row in zip(sampled, logits, strict=True)]

    def _sample(self, work: Work, logits: NDArray[np.float32]) -> SequenceOutput:
        sequence = self._batch.sequences[work.seq]
        assert sequence.sampling is not None, "checked when the step was laid out"
        end = work.start + work.count
        known = sequence.tokens.view[:end]
        output = self._sampler.sample(work.seq, logits, sequence.sampling, known, sequence.prompt_len)
        if end == len(sequence.tokens):
            sequence.tokens.extend([output.token])
        return output


_WARM_SAMPLING = SamplingParams(temperature=1.0, seed=0, top_p=0.9, top_k=4, repetition_penalty=1.1)
