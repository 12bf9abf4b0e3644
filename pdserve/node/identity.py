"""Who a node is: its name, its incarnation, and the facts of its model and cache that hello compares."""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pdserve.config import NodeConfig, cache_directory
from pdserve.http.frontend import ServedModel
from pdserve.messenger.facts import GroupFacts, NodeFacts
from pdserve.messenger.geometry import CacheGroup
from pdserve.models.card import ModelCard, load_card
from pdserve.models.default import ensure_default_model
from pdserve.models.fingerprint import fingerprint
from pdserve.worker.protocol import Ready

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DEFAULT_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class ServedWeights:
    """A model directory that has been looked at: its facts and its fingerprint."""

    directory: Path
    card: ModelCard
    fingerprint: str
    name: str


def find_model(config: NodeConfig) -> ServedWeights:
    """The model a node serves. Blocks (the first time it converts or hashes weights): call it before the loop
    serves anything. Raises ModelError."""
    cache = cache_directory()
    if config.model.model == "default":
        directory, name = ensure_default_model(cache), DEFAULT_NAME
    else:
        directory = Path(config.model.model).expanduser()
        name = directory.resolve().name
    card = load_card(directory)
    return ServedWeights(directory, card, fingerprint(directory, cache), name)


def max_model_len(config: NodeConfig, card: ModelCard) -> int:
    """Tokens of one sequence at most: as configured, else what the model was trained for."""
    return config.model.max_model_len or card.max_position_embeddings


def served_model(config: NodeConfig, weights: ServedWeights) -> ServedModel:
    """The model as clients see it."""
    return ServedModel(
        names=config.server.served_model_name or (weights.name,),
        max_model_len=max_model_len(config, weights.card),
        vocab_size=weights.card.vocab_size,
        eos_token_ids=weights.card.eos_token_ids,
        created=int(time.time()),
        role=config.engine.role,
        root=weights.name,
    )


def node_id(config: NodeConfig, port: int) -> str:
    """The configured name, or one from role, host name and port."""
    if config.cluster.node_id is not None:
        return config.cluster.node_id
    return f"{config.engine.role}-{socket.gethostname()[:32]}-{port}"


def node_facts(config: NodeConfig, weights: ServedWeights, ready: Ready, name: str) -> NodeFacts:
    """What hello says of this node. Raises ConfigError on a combination no layout fits."""
    card = weights.card
    facts = NodeFacts(
        node_id=name,
        incarnation=secrets.randbits(52),
        role=config.engine.role,
        model=weights.fingerprint,
        cache_groups=(
            CacheGroup("model", card.num_layers, card.num_kv_heads, 2 * card.head_dim * _BYTES[ready.dtype]),
        ),
        dtype=ready.dtype,
        page_size=ready.page_size,
        segment_tokens=config.cluster.segment_tokens,
        groups=(GroupFacts(tp=1, num_pages=ready.num_pages, epoch=secrets.randbits(32)),),
        max_model_len=max_model_len(config, card),
    )
    facts.check()
    return facts
