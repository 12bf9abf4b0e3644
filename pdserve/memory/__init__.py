"""Shared memory of a rank: the arena that holds its KV cache, and its layer counter."""

from pdserve.memory.arena import Arena, MemfdArena, open_arenas

__all__ = ["Arena", "MemfdArena", "open_arenas"]
