"""What only the notebooks use: what a page begins with and shows, and the pictures and tables of each.

paper/         02: the paper's figures, tables and claims
feasibility/   03: what can be checkpointed how often
ablation/      04: what each part of the planner, and slack, buys
"""
