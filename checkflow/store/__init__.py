"""Checkpoints in host memory and on disk: slots, the saver process, the files and how they are verified.

Nothing here imports torch: the saver must start in a fraction of a second and own nothing of the trainer's.
docs/store.md specifies the bytes and the promises.
"""
