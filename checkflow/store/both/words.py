"""What the trainer says to a saver, or to the uploader to a bucket: a word a packet, on a socket pair that keeps them
apart. And which signals these do not heed.

It imports next to nothing: a saver reads it before it knows whether there will be any work.
"""

import signal

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by a saver, from before its first instruction
WAKE, NOW, LAST, CLOSE = b"wake", b"now", b"last", b"close"
"""The trainer's words: look at the slots; and try at once what failed before; no training follows what is due (to the
uploader: have what is newest on disk there now, whatever a group waits for); exit once nothing is due."""
AGREED, RESTORED, UPLOAD, THERE, DROPPED = b"agreed", b"restored", b"upload", b"there", b"dropped"
"""Its words about a checkpoint of several ranks. To the saver, with its sequence number, or of one that was restored
with its serial: every rank has verified its part, so what is older may be pruned. To the uploader, with its serial on
this rank's disk: every rank uploads its part next; the bucket has every rank's part, so what is older may be removed
there; it never will, so nobody needs this."""
MAX_WORD_BYTES = 64
MAX_LINE_BYTES = 2**16  # of what a mirror says to a trainer that waits for its end


def numbered(word: bytes, number: int) -> bytes:
    """One of the trainer's words about a checkpoint."""
    return word + b" %d" % number


def number_in(packet: bytes, word: bytes) -> int | None:
    """The inverse; None for another word."""
    said, _, number = packet.partition(b" ")
    return int(number) if said == word and number else None
