"""One file a kind of torture. Each has RUNS (short, default) and run(bench, chance), which yields outcomes.

MISSING, where a kind has it, is a function that says why it cannot run here, or None.
"""
