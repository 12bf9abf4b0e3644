"""Requests, pages and batches: what a node computes next. Pure: no clock, no I/O, no thread.

limits.py      role and bounds of a scheduler; validation of a request against them
request.py     one request, its phases and their one table
waiting.py     the bounded queue
pages.py       whose page is whose; spans.py keeps the free ones adjacent
batch.py       the rows of the worker's batch
step.py        one step under the token budget
scheduler.py   all of it behind one face
plan.py        what goes to the workers and comes back; sampling.py: how they sample
events.py      what the node is told; statistics.py: gauges and counters; invariants.py: what must hold
"""
