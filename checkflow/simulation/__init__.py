"""A schedule played against timings other than those it was planned for: what waits, for how long, and what slack buys.

`simulate.py` follows the runtime event by event; `drift.py` and `slack.py` ask it how much the timings may drift.
"""
