"""One attribute of torch in another's place for as long as something is traced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_INHERITED = object()


@contextmanager
def replaced(owner: object, name: str, by: object) -> Iterator[None]:
    """Within, `owner.name` is `by`. Afterwards it is what it was; what a class inherits it inherits again."""
    getattr(owner, name)  # raises for what is not there
    own = vars(owner).get(name, _INHERITED)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if own is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
