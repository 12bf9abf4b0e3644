"""Shared memory of a rank: the arena that holds its KV cache, and its layer counter."""
