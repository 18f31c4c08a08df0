"""What a resume needs of a training: its tensors, their names, what the host holds, and putting all of it back.

names.py     the one naming of tensors             live.py     the one walk over live tensors
holders.py   models and optimizers, by name        memory.py   how a tensor lies in memory
groups.py    what optimizers choose kernels by     refused.py  what cannot be checkpointed, and why
host/        what no tensor file holds             restore/    a checkpoint's state into a training
"""
