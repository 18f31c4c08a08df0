"""The schedule of a training of which nothing is known yet: all of its state is read when an iteration ends.

It is correct for any iteration, and slower than a plan: to the runtime, all that happens in between is one operator. By
policy checkfreq the state is first copied in the device's memory, and leaves from there until the next checkpoint.
"""

from __future__ import annotations

import torch

from checkflow.dtypes import name_of
from checkflow.errors import InputError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.learning.messages import COPIES
from checkflow.schedule import ActionRow, AnchorRow, Certificate, Schedule, StateRow, ViewRow, sealed
from checkflow.state.shards import give_back_gathered
from checkflow.torch_internals import storage_id
from checkflow.trace.state import TracedState, live_states
from checkflow.training import Training

MODEL = "this training"  # what stands where a schedule names the model that it was compiled from
_AT_END = (0, 1)  # the only anchor, of the iteration that the checkpoint is of


def provisional(training: Training, policy: str, interval: int) -> Schedule:
    """Of the state that there is now, for a checkpoint each `interval` iterations.

    Raises InputError where there is no state, or what no checkpoint can hold.
    """
    give_back_gathered(training.models)
    tensors = _tensors(training)
    if not tensors:
        raise InputError("model: has no parameter and no buffer; there is nothing to checkpoint")
    indices = tuple(range(len(tensors)))
    state_bytes = sum(tensor.size_bytes for tensor in tensors)
    is_copied = policy == COPIES
    graph = Graph(
        model=MODEL,
        arguments=(),
        device="",
        traced_on="",
        ops=(Op("iteration", reads=indices, writes=indices, flops=0, traffic_bytes=0, dtype="", time_ns=0),),
        tensors=tensors,
        anchors=(Anchor(AnchorKind.ITERATION_END, "", 1, 1),),
    )
    return sealed(
        Schedule(
            graph_fingerprint=graph_fingerprint(graph),
            state_fingerprint=state_fingerprint(graph),
            model=MODEL,
            arguments=(),
            device="",
            traced_on="",
            formulation="direct",
            transfers="streaming",
            interval=1,
            bandwidth_bytes_per_s=1,
            slack_ppm=0,
            chunk_bytes=None,
            granule_bytes=1,
            memory_limit_bytes=None,
            steps=1,
            iteration_time_ns=0,
            state_bytes=state_bytes,
            static_state_bytes=0,
            certificate=Certificate(
                training_peak_bytes=0,
                peak_bytes=0,
                lower_bound_bytes=None,
                ideal_peak_bytes=None,
                gap=None,
                snapshot_bytes=state_bytes if is_copied else 0,
                solver="none",
                solver_why="nothing is known yet of an iteration: all is read when it ends",
            ),
            state=tuple(
                StateRow(
                    id=index,
                    bytes=tensor.size_bytes,
                    written=True,
                    views=tuple(ViewRow(name=view.name, dtype=view.dtype, shape=view.shape) for view in tensor.views),
                )
                for index, tensor in enumerate(tensors)
            ),
            anchors=(AnchorRow(kind="iteration_end", subject="", occurrence=1, position=1),),
            actions=tuple(
                ActionRow(
                    tensor=index,
                    offset=0,
                    bytes=tensors[index].size_bytes,
                    snapshot=_AT_END if is_copied else None,
                    offload=_AT_END,
                    release=(interval, 1) if is_copied else None,
                )
                for index in sorted(indices, key=lambda index: tensors[index].role is not Role.BUFFER)
            ),
        )
    )


def _tensors(training: Training) -> tuple[Tensor, ...]:
    """A tensor for each storage, as a trace of this training would have it."""
    states = [state for state in live_states(training) if not state.elsewhere]
    on_cuda = any(state.tensor.device.type == "cuda" for state in states)
    by_storage: dict[int, list[TracedState]] = {}
    for state in states:
        on_host = state.tensor.device.type == "cpu" if on_cuda else state.host
        if not on_host and state.tensor.layout == torch.strided and state.tensor.untyped_storage().nbytes():
            by_storage.setdefault(storage_id(state.tensor.untyped_storage()), []).append(state)
    return tuple(_tensor(found) for found in by_storage.values())


def _tensor(states: list[TracedState]) -> Tensor:
    views = tuple(View(str(state.name), name_of(state.tensor.dtype), tuple(state.tensor.shape)) for state in states)
    first = states[0]
    return Tensor(str(first.name), first.role, first.tensor.untyped_storage().nbytes(), 0, 1, views)
