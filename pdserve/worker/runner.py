"""The model runner: a plan in, sampled tokens out, a tick after each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdserve.engine.plan import Plan, SequenceOutput

if TYPE_CHECKING:
    import torch

    LogitsHook = Callable[[list[int], torch.Tensor], None]


class ModelRunner:
    """Runs plans on one rank's model and arena, one after another; not thread-safe.

    `arena`: a writable buffer of at least `model.num_layers * num_pages * kv_page_bytes(...)` bytes; the
    runner borrows it and keeps views of it until `close()`. `kv_dtype` is "float32" or "float16" (resolve
    "auto" with `resolve_kv_dtype`). `on_layer(l)` is called after layer l's attention output projection,
    `on_layer(num_layers)` after the final norm; also for a plan without work, never by `warm_up`.
    `on_logits(seqs, logits)` sees the raw float32 logits [rows, vocab] of the rows that are sampled.
    """

    def __init__(
        self,
        model: Any,
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
        raise NotImplementedError

    def execute(self, plan: Plan) -> list[SequenceOutput]:
        """Apply the plan to the persistent batch, compute, sample; outputs in the order of `plan.work`."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compile kernels and touch the weights; leaves batch and arena as they were (zero)."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop every view of the arena, so that it can be unmapped."""
        raise NotImplementedError
