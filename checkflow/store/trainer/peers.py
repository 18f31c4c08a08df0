"""What a handle asks of the other ranks of its job: a checkpoint counts once each of them has its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Peers(Protocol):
    """The other ranks. Nobody waits for them: what they agree on is told in another thread."""

    attempt: int  # of which what is staged now is; a restore begins another one

    @property
    def deadline_s(self) -> float:
        """How long a rank waits for the others before it says that they do not come."""

    def lags(self, iterations: int) -> None:
        """From now on this rank stages its part of a checkpoint so many iterations after its own. Raises PeerError."""

    def any_lags_more(self, iterations: int) -> bool:
        """Whether any rank now stages its part more than so many iterations after the checkpoint's own. Raises
        PeerError."""

    def reads_whole(self, every: int) -> None:
        """From now on this rank reads none as a whole oftener than each so many iterations. Raises PeerError."""

    def whole_every(self) -> int:
        """The greatest that any rank ever said so, or 0. Raises PeerError."""

    def staging(
        self, iteration: int, rules: Callable[[], bool], agreed: Callable[[bool | None], None]
    ) -> Callable[[], None]:
        """What is to be called once this rank's part is staged.

        The rank that is the last one to say so rules whether it is due on every rank; `agreed` is called with that, or
        with None where some rank will have no part.
        """

    def skipped(self, iteration: int) -> None:
        """This rank will have no part of this one."""

    def verified(self, attempt: int, iteration: int, serial: int, agreed: Callable[[], None]) -> None:
        """This rank's part was read back from its disk, where it has this serial; `agreed` is called once every rank's
        was."""

    def trouble(self) -> str | None:
        """What keeps them from agreeing, in a line, once."""

    def failure(self) -> str | None:
        """Why no checkpoint of this training can count, in a line, each time that it was found."""
