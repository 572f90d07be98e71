"""Measuring an engine from inside its process: what a request waits for, and how much is made in a second.

The same measurement stands behind `python -m tinyserve bench latency`, `throughput` and `startup`, for any model, and
behind the table of anchor rows in the repository's `bench/` folder. It uses nothing that a notebook could not.

Before: engine/engine.py.  After: cli/bench.py.
"""
