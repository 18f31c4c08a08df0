"""Where `checkflow` and `python -m checkflow` begin: an interrupt, or a package that is not there, is told in one line.

From the first import on: checkflow.cli, which tells of them later, needs packages itself.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from checkflow.errors import EXIT_BAD_INPUT
from checkflow.missing import not_installed

EXIT_INTERRUPTED = 130  # as in checkflow.cli, which may not be there yet


def main() -> None:
    """Entry point of the `checkflow` command."""
    try:
        from checkflow.cli import main as begin  # click takes a while, and Ctrl-C may come before it is there

        begin()
    except KeyboardInterrupt:
        _end("\ncheckflow: interrupted; nothing was left half-written", EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        line = not_installed(error)
        if line is None:
            raise
        _end(f"checkflow: {line}", EXIT_BAD_INPUT)


def _end(line: str, code: int) -> NoReturn:
    if sys.stderr is not None:
        sys.stderr.write(f"{line}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
