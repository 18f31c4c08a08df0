"""An object store for tests: moto's S3 over HTTP, a process that can be out and come back with what it held.

python bucket_server.py: prints its port; "out" and "back" on its standard input, and an end with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

from checkflow.store.bucket.names import BucketContents
from checkflow.store.bucket.objects import Objects

BUCKET = "checkpoints"


class BucketServer:
    """`url`: below it nothing has been put yet. `out()` until `back()`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        with urlopen(Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")):
            pass
        self.anew()

    def anew(self) -> None:
        self.url = f"s3://{BUCKET}/{uuid.uuid4().hex}/run"

    def out(self) -> None:
        """Nobody listens any more; what it holds stays in its memory."""
        self._say("out")

    def back(self) -> None:
        self._say("back")

    def hang(self) -> None:
        """It takes connections and says nothing, until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == word

    @property
    def objects(self) -> Objects:
        return Objects.open(self.url)

    def contents(self) -> BucketContents:
        return BucketContents.of(self.objects.sizes())

    def names(self) -> list[str]:
        """Of the checkpoints that count, newest first."""
        return self.contents().newest_first


@contextmanager
def bucket_server(**environment: str) -> Iterator[BucketServer]:
    """With the credentials in this process's environment; `environment`: of the server."""
    command = [sys.executable, str(Path(__file__))]
    before = dict(os.environ)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=before | environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        server = BucketServer(process, int(process.stdout.readline()))
        os.environ.update(server.environment)
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)
            process.stdin.close()


def main() -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from moto.server import ThreadedMotoServer

    MotoRequestHandler.protocol_version = "HTTP/1.0"  # no connection outlives its request, nor what is out
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    port = 0

    def started() -> ThreadedMotoServer:
        server = ThreadedMotoServer("127.0.0.1", port=port, verbose=False)
        server.start()
        return server

    server = started()
    _, port = server.get_host_and_port()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    for word in map(str.strip, sys.stdin):
        if word == "out":
            server.stop()
        else:
            server = started()
        sys.stdout.write(f"{word}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
