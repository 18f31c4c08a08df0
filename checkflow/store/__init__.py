"""Checkpoints in host memory and on disk: slots, the saver process, the files and how they are verified.

By what it is, and by whose process runs it:

    format/    what lies on disk: which bytes, how they are written, read and verified, how long they stay
    memory/    the slots, which trainer and saver share
    both/      what else both have: who holds the store, what they say to each other, how long they try again
    saver/     what runs in the saver's process alone
    trainer/   what runs in the trainer's alone

Imports go up this list, and never from saver/ to trainer/ or back; repair.py is for `checkflow check`.
Nothing here imports torch: the saver must start in a fraction of a second and own nothing of the trainer's.
docs/store.md specifies the bytes and the promises.
"""
