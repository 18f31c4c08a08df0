"""How long, and how often, what failed is tried again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

RETRY_S = 600.0
FIRST_DELAY_S, MOST_DELAY_S = 0.1, 30.0


@dataclass(slots=True)
class Patience:
    """One trouble after the other: each begins with a failure, and ends with a success.

    From failure to failure the delay doubles. A trouble older than `limit_s` is `exhausted`: by then a try was made.
    """

    limit_s: float
    _since_s: float | None = field(init=False, default=None)  # time.monotonic, as all of these
    _next_s: float = field(init=False, default=0.0)
    _delay_s: float = field(init=False, default=FIRST_DELAY_S)
    exhausted: bool = field(init=False, default=False)

    def fails(self) -> bool:
        """Note a failure, and return whether a trouble begins with it."""
        now = time.monotonic()
        begins = self._since_s is None
        since = now if self._since_s is None else self._since_s
        self._since_s = since
        self.exhausted = now >= since + self.limit_s
        left_s = MOST_DELAY_S if self.exhausted else since + self.limit_s - now  # the last try comes at the limit
        self._next_s = now + min(self._delay_s, left_s)
        self._delay_s = min(2 * self._delay_s, MOST_DELAY_S)
        return begins

    def succeeds(self) -> float | None:
        """The trouble is over; how long it lasted, in seconds, None where there was none."""
        lasted = None if self._since_s is None else time.monotonic() - self._since_s
        self._since_s, self._next_s, self._delay_s, self.exhausted = None, 0.0, FIRST_DELAY_S, False
        return lasted

    def renew(self) -> None:
        """As if the trouble, if there is one, began now."""
        if self._since_s is not None:
            self._since_s, self._delay_s, self.exhausted = time.monotonic(), FIRST_DELAY_S, False
            self.hurry()

    def hurry(self) -> None:
        """The next try is due now."""
        self._next_s = 0.0

    @property
    def wait_s(self) -> float:
        """Until the next try; 0 where none failed."""
        return max(0.0, self._next_s - time.monotonic())
