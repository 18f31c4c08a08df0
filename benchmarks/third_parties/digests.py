"""Every byte that a resume must bring back: of models, optimizers and random generators, by walking all they hold."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import numpy
import torch
from torch import Tensor

import checkflow


def digest(training: checkflow.Training) -> str:
    """Independent of checkflow's own walk: state_dicts as they are, and the generators."""
    content = hashlib.sha256()
    for model in training.models:
        _add(content, model.state_dict())
    for optimizer in training.optimizers:
        _add(content, optimizer.state_dict())
    _add(content, torch.get_rng_state())
    content.update(repr((random.getstate(), numpy.random.get_state())).encode())
    return content.hexdigest()


def _add(content: hashlib._Hash, value: object) -> None:
    if isinstance(value, Tensor):
        content.update(f"{value.dtype}{tuple(value.shape)}".encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            content.update(repr(key).encode())
            _add(content, value[key])
    elif isinstance(value, (list, tuple)):
        for each in value:
            _add(content, each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        content.update(repr(value).encode())
