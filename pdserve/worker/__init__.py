"""The rank process, and the node's link to it.

`protocol`, `frames` and `link` are the node's side and import no torch; `main` and what it loads run in the
worker process alone.
"""
