"""What went wrong in the background reaches the user: raised once, or told, as was asked for."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import Literal

from checkflow.errors import StoreError
from checkflow.store.trainer.keeper import News
from checkflow.store.trainer.status import Tally

OnError = Literal["raise", "warn"]


def warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


class Delivery:
    """Of one handle's `news`, to which other threads add."""

    def __init__(self, news: deque[News], tally: Tally, on_error: OnError, notify: Callable[[str], None]) -> None:
        self._news = news
        self._tally = tally
        self._on_error = on_error
        self._notify = notify

    def announce(self) -> None:
        """Tell now, to who waits, what is not to be raised afterwards."""
        if self._on_error == "warn":
            self.deliver()
            return
        news = [self._news.popleft() for _ in range(len(self._news))]
        self._news.extendleft(each for each in reversed(news) if each.is_error)
        for each in news:
            if not each.is_error:
                self._notify(each.line)

    def deliver(self) -> None:
        """Tell all. Raises StoreError of the first error, where errors are to be raised."""
        first: str | None = None
        while self._news:
            news = self._news.popleft()
            if news.is_error:
                self._tally.fail(news.line)
            if news.is_error and self._on_error == "raise" and first is None:
                first = news.line
            else:
                self._notify(news.line)
        if first is not None:
            raise StoreError(first)
