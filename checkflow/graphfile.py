"""Graph <-> JSON. The format is described in graphs/FORMAT.md."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
from pydantic import TypeAdapter

from checkflow.errors import FormatError
from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.jsonfile import digest_of, parse_json, render, validate, write_text

FORMAT, VERSION = "checkflow-graph", 1
