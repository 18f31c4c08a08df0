"""Several processes that train one model together: who they are, and what they agree on.

group.py       the ranks, and what each of them says before training goes on
agreement.py   what they agree on while it does, which nobody waits for
marks.py       which checkpoints every rank has
"""
