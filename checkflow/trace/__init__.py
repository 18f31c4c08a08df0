"""A training iteration as a graph: operators, storages, lifetimes and anchors, and a program that replays it."""

from checkflow.trace.live import recorded
from checkflow.trace.ranks import World, in_place_of, world_of
from checkflow.trace.replay import replay
from checkflow.trace.tracing import Traced, trace_training

__all__ = ["Traced", "World", "in_place_of", "recorded", "replay", "trace_training", "world_of"]
