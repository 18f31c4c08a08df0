"""The paper's evaluation (Liu et al., Checkflow, section IV) from sweeps: its figures and tables, ours beside them.

A sweep here is over graph files named NETWORK-BATCH.json.
"""
