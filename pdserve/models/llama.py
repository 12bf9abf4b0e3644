"""The Llama family: grouped-query attention, SwiGLU, RMS norm, rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pdserve.layers import kernels
from pdserve.layers.attention import PagedAttention, PagedCache
from pdserve.layers.linear import Embedding, PackedMatrix
from pdserve.layers.norm import RmsNorm
from pdserve.layers.rope import RopeTable
from pdserve.layers.step import StepBatch
from pdserve.models.card import ModelCard
from pdserve.models.rope import rope_frequencies

TakeTensor = Callable[[str], torch.Tensor]
"""Gives a checkpoint tensor by name: matrices in the type they are to be kept in."""


class LlamaLayer:
    """One decoder layer. q, k, v are one matrix, gate and up another, so that a row of x is read once."""

    def __init__(self, card: ModelCard, index: int, take: TakeTensor, threads: int) -> None:
        def matrix(*names: str) -> PackedMatrix:
            return PackedMatrix(
                torch.cat([take(f"model.layers.{index}.{name}.weight") for name in names]), threads
            )

        def norm(name: str) -> RmsNorm:
            return RmsNorm(take(f"model.layers.{index}.{name}.weight"), card.rms_norm_eps)

        self._size = card.intermediate_size
        self._input_norm = norm("input_layernorm")
        self._qkv = matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._attention = PagedAttention(card.num_heads, card.head_dim, threads)
        self._output = matrix("self_attn.o_proj")
        self._middle_norm = norm("post_attention_layernorm")
        self._gate_up = matrix("mlp.gate_proj", "mlp.up_proj")
        self._down = matrix("mlp.down_proj")

    def attend(
        self, hidden: torch.Tensor, batch: StepBatch, rope: RopeTable, cache: PagedCache, index: int
    ) -> None:
        """hidden += o_proj(attention(norm(hidden))); K and V of the step's rows go to the cache first."""
        qkv = self._qkv(self._input_norm(hidden))
        mixed = self._attention(qkv, batch, rope, cache.layers[index])
        kernels.add_in_place(hidden.numpy(), self._output(mixed).numpy())

    def feed_forward(self, hidden: torch.Tensor) -> None:
        """hidden += down(silu(gate(x)) · up(x)) with x = norm(hidden)."""
        gate_up = self._gate_up(self._middle_norm(hidden))
        active = torch.empty(hidden.shape[0], self._size)
        kernels.silu_multiply(gate_up.numpy(), active.numpy())
        kernels.add_in_place(hidden.numpy(), self._down(active).numpy())


class LlamaModel:
    """A Llama checkpoint in packed weights. Immutable after `prepare`; activations belong to the caller."""

    def __init__(self, card: ModelCard, take: TakeTensor, *, dtype: str, threads: int) -> None:
        self.card = card
        self.num_layers = card.num_layers
        self.dtype = dtype
        self.threads = threads
        self._rope = RopeTable(rope_frequencies(card.rope, card.head_dim), 1)
        self._layers = [LlamaLayer(card, index, take, threads) for index in range(card.num_layers)]
        self._norm = RmsNorm(take("model.norm.weight"), card.rms_norm_eps)
        embedding = take("model.embed_tokens.weight")
        self._embedding: Embedding | PackedMatrix
        if card.tie_word_embeddings:
            self._embedding = self._head = PackedMatrix(embedding, threads)
        else:
            self._embedding = Embedding(embedding)
            self._head = PackedMatrix(take("lm_head.weight"), threads)

    def prepare(self, max_model_len: int) -> None:
        """Compute the rotary tables for that many positions."""
        self._rope = RopeTable(rope_frequencies(self.card.rope, self.card.head_dim), max_model_len)

    def forward(self, batch: StepBatch, cache: PagedCache, on_layer: Callable[[int], None]) -> torch.Tensor:
        """Run a step's rows through all layers; the final hidden state [outputs, hidden] of the sampled rows.

        `on_layer(l)` is called when layer l's K and V are in the cache and its output projection is done,
        `on_layer(num_layers)` after the final norm.
        """
        hidden = self._embedding.rows(torch.from_numpy(batch.tokens))
        for index, layer in enumerate(self._layers):
            if len(batch.tokens):
                layer.attend(hidden, batch, self._rope, cache, index)
            on_layer(index)
            if index == self.num_layers - 1:
                # Nobody reads the other rows any more.
                hidden = hidden[torch.from_numpy(batch.sampled)]
            if hidden.shape[0]:
                layer.feed_forward(hidden)
        final = self._norm(hidden)
        on_layer(self.num_layers)
        return final

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> raw float32 logits [rows, vocab]."""
        return self._head(hidden)[:, : self.card.vocab_size]


def tensor_shapes(card: ModelCard) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this card must have, and its shape."""
    q = card.num_heads * card.head_dim
    kv = card.num_kv_heads * card.head_dim
    size, inner = card.hidden_size, card.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (card.vocab_size, size),
        "model.norm.weight": (size,),
    }
    if not card.tie_word_embeddings:
        shapes["lm_head.weight"] = (card.vocab_size, size)
    for index in range(card.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (size,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (size,)
        shapes[f"{prefix}.self_attn.q_proj.weight"] = (q, size)
        shapes[f"{prefix}.self_attn.k_proj.weight"] = (kv, size)
        shapes[f"{prefix}.self_attn.v_proj.weight"] = (kv, size)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (size, q)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, size)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, size)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (size, inner)
    return shapes
