"""Several processes that train one model together: who they are, and what they agree on.

group.py       the ranks, and what each of them says before training goes on
agreement.py   what they agree on while it does, which nobody waits for
marks.py       which checkpoints every rank has
parts.py       the parts of one, on a disk
partitions.py  optimizers whose state ranks divide by parameter
resharding.py  one, as ranks have it that divide the state otherwise
dcp.py         a store for torch.distributed.checkpoint
"""
