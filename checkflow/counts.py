"""Numbers as files and messages hold them. Each has a bound, so that whatever is made of it fits a float."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from checkflow.units import MOST

_LARGEST = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=_LARGEST)]  # of what lies in memory or is told one by one
Positive = Annotated[int, Field(ge=1, le=_LARGEST)]
Whole = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Amount = Annotated[int, Field(ge=0, le=MOST)]  # in some unit
PositiveAmount = Annotated[int, Field(gt=0, le=MOST)]
Total = Annotated[int, Field(ge=0, le=MOST**2)]  # that amounts add up to, or a rate that would do for them
