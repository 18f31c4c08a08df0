"""Where `checkflow` and `python -m checkflow` begin: an interrupt is told in one line from the first import on."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130  # as in checkflow.cli, which may not be there yet


def main() -> None:
    """Entry point of the `checkflow` command."""
    try:
        from checkflow.cli import main as begin  # click takes a while, and Ctrl-C may come before it is there

        begin()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("\ncheckflow: interrupted; nothing was left half-written\n")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
