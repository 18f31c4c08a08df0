"""The uploader, started with exec by the trainer: no descriptor but three, its own session, no torch.

    python -m checkflow.store.bucket SOCKET DIRECTORY TRAINER

The first packet on the socket is its configuration. It holds no lock: it only reads the store, and where the next run
begins before it has ended, that run uploads what is newest.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from checkflow.background import give_way
from checkflow.store.both.config import BucketConfig
from checkflow.store.both.messages import MAX_PACKET_BYTES
from checkflow.store.both.words import IGNORED
from checkflow.store.bucket.loop import Uploader
from checkflow.store.bucket.objects import Objects
from checkflow.store.bucket.upload import Uploads


def main(arguments: list[str]) -> int:
    """Run until the trainer is gone and the bucket has the newest checkpoint. Not 0 where it does not have it."""
    end_fd, directory, trainer = map(int, arguments)
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
    give_way()
    os.fchdir(directory)
    end = socket.socket(fileno=end_fd)
    config = BucketConfig.parse(end.recv(MAX_PACKET_BYTES))
    uploads = Uploads(
        Objects.open(config.url),
        config.retention,
        config.store,
        None if config.grouped else config.before,
        Objects.open(config.whole_url) if config.whole_url is not None else None,
    )
    return 0 if Uploader(config, uploads, end, trainer, directory).run() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
