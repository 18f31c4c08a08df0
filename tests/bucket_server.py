"""An object store for tests: moto's S3 over HTTP, a process that can be out and come back with what it held.

python bucket_server.py: prints its port; "out" and "back" on its standard input, and an end with it.
"""

from __future__ import annotations

import http.client
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

from checkflow.store.bucket.names import BucketContents
from checkflow.store.bucket.objects import Objects

BUCKET = "checkpoints"


class BucketServer:
    """`url`: below it nothing has been put yet. `out()` until `back()`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self._process = process
        self.port = port
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

    def put_as_is(self, name: str) -> None:
        """An empty object of this name below `url`, which no client may take for a path."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("PUT", f"/{self.url.removeprefix('s3://')}/{name}", body=b"")
        with connection.getresponse() as answer:
            assert answer.status == 200, (name, answer.status)
        connection.close()

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


Fault = Callable[[str, str, int, bytes], tuple[int, bytes]]
"""What comes back instead, of a method, a path with its query, and what the server has answered."""


class Between:
    """Between a client and a server: `fault`, if there is one, makes another answer of each that comes."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.asked: list[str] = []  # methods and paths, since somebody has cleared it


@contextmanager
def between(server: BucketServer) -> Iterator[Between]:
    """What this process asks goes through it."""
    here = Between()

    class Relay(BaseHTTPRequestHandler):
        def _relay(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection("127.0.0.1", server.port)
            drop = ("host", "connection", "transfer-encoding")
            headers = {name: value for name, value in self.headers.items() if name.lower() not in drop}
            connection.request(self.command, self.path, body=data, headers=headers)
            with connection.getresponse() as answer:
                status, body = answer.status, answer.read()
                headers = dict(answer.getheaders())
            connection.close()
            here.asked.append(f"{self.command} {self.path}")
            if here.fault is not None:
                status, body = here.fault(self.command, self.path, status, body)
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "server", "date", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = _relay

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Relay) as relay:
        thread = threading.Thread(target=relay.serve_forever)
        thread.start()
        before = os.environ["AWS_ENDPOINT_URL"]
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{relay.server_port}"
        try:
            yield here
        finally:
            os.environ["AWS_ENDPOINT_URL"] = before
            relay.shutdown()
            thread.join()


def refused(code: str, status: int) -> tuple[int, bytes]:
    """As S3 says no."""
    return status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode()


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
