"""Verified bytes -> models, optimizers and everything else, in place.

match.py       what goes where, refused before anything changed     files.py   safetensors bytes -> tensors
objects.py     what attached objects gave
optimizers.py  groups and state, made as the optimizer keeps them
"""

from checkflow.state.restore.match import Restored, check_restorable, read, restore, restore_parsed

__all__ = ["Restored", "check_restorable", "read", "restore", "restore_parsed"]
