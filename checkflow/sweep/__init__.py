"""Grids of compilations: which cells can be checkpointed, at what cost, and where the edge of that lies.

rows = sweep.run(sweep.Grid(models=("bert",), settings=(("batch_size", ("1", "32")),)))
pandas.DataFrame(sweep.records(rows))
"""

from checkflow.sweep.cells import Axis, Cell, Edge, Grid, Outcome, Row, Search
from checkflow.sweep.files import records
from checkflow.sweep.running import find, run

__all__ = ["Axis", "Cell", "Edge", "Grid", "Outcome", "Row", "Search", "find", "records", "run"]
