"""What the layers need to know of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepBatch:
    """Ragged rows of a step, flattened: row i is token `tokens[i]` at `positions[i]` of its sequence.

    All int64. `pages[i]`, `slots[i]`: where row i's K and V go. `tables` [sequences, pages]: page tables,
    padded with the scrap page 0. `tiles` [tiles, 4]: (row, count, position, table), see
    `attention.cut_tiles`. `sampled` [outputs]: the rows whose logits are wanted.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    pages: NDArray[np.int64]
    slots: NDArray[np.int64]
    tables: NDArray[np.int64]
    tiles: NDArray[np.int64]
    sampled: NDArray[np.int64]
