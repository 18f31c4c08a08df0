"""What an optimizer's record says of some of its parameters."""

from __future__ import annotations

from collections.abc import Collection

from checkflow.errors import FormatError
from checkflow.state.host.decode import tensor_of
from checkflow.state.host.encode import tensor_parts
from checkflow.state.host.json_values import Json, RefusedError
from checkflow.state.host.record import CohortRecord, OptimizerRecord
from checkflow.state.names import StateName, owner, stems


def state_of_some(record: OptimizerRecord, parameters: Collection[str]) -> OptimizerRecord:
    """The record with the state of these parameters alone, and all of its groups. Raises FormatError."""
    names = (StateName(name) for group in record.groups for name in group.parameters)
    others = {stem: name for name, stem in stems(record.name, names).items() if name not in parameters}

    def stays(path: str) -> bool:
        return owner(StateName.of(record.name, path), others) is None

    cohorts = (cohort_of_some(cohort, parameters, record.name) for cohort in record.cohorts)
    return record.model_copy(
        update={
            "cohorts": tuple(cohort for cohort in cohorts if cohort.parameters),
            "tied": {path: to for path, to in record.tied.items() if stays(path)},
            "orders": {path: order for path, order in record.orders.items() if stays(path)},
        }
    )


def cohort_of_some(cohort: CohortRecord, parameters: Collection[str], holder: str) -> CohortRecord:
    """What it says of these parameters alone; `holder`: the optimizer. Raises FormatError."""
    at = [index for index, name in enumerate(cohort.parameters) if name in parameters]
    if len(at) == len(cohort.parameters):
        return cohort
    host: dict[str, Json] = {}
    for entry, stacked in cohort.host.items():
        try:
            host[entry] = tensor_parts(tensor_of(stacked)[at])
        except (RefusedError, IndexError) as error:
            raise FormatError(f"{holder}.state: {entry} of all parameters: {error}; take another checkpoint") from None
    try:
        values = {entry: tuple(each[index] for index in at) for entry, each in cohort.values.items()}
    except IndexError:
        raise FormatError(
            f"{holder}.state: its entries have not one value for each parameter; take another checkpoint"
        ) from None
    return cohort.model_copy(
        update={"parameters": tuple(cohort.parameters[index] for index in at), "host": host, "values": values}
    )
