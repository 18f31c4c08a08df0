"""A schedule played against timings other than those it was planned for: what waits, and for how long.

`simulate.py` follows the runtime event by event; `drift.py` asks it how much the timings may drift.
"""
