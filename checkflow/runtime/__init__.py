"""Executes a schedule: hooks at anchors issue its copies, guards before writes wait for them.

`executor.py` decides, a `Device` copies, a `Sink` takes whole checkpoints. Nothing here knows how a schedule was made
or where a checkpoint goes.
"""
