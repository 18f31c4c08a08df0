"""What a saver says to its trainer: one JSON object a packet, on a socket pair that keeps packets apart.

The uploader to a bucket says it in the same way. What the trainer says is in words.py.
"""

from __future__ import annotations

import socket
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from checkflow.counts import Count
from checkflow.text import plain

MAX_PACKET_BYTES = 2**16
MAX_TEXT = 4096
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class DurableReport(BaseModel):
    """A checkpoint's manifest is published and on disk."""

    model_config = _STRICT

    kind: Literal["durable"] = "durable"
    sequence: Count
    iteration: Count
    serial: Count
    size_bytes: Count
    written_bytes: Count  # without files that the checkpoint before has, too
    write_ns: Count


class VerifiedReport(BaseModel):
    """A durable checkpoint's hashes were read back, and what retention no longer holds was removed."""

    model_config = _STRICT

    kind: Literal["verified"] = "verified"
    sequence: Count
    iteration: Count
    serial: Count
    verify_ns: Count
    pruned: Count


class UploadedReport(BaseModel):
    """A checkpoint's manifest is in the bucket, and so all of it."""

    model_config = _STRICT

    kind: Literal["uploaded"] = "uploaded"
    iteration: Count
    serial: Count  # on disk
    size_bytes: Count  # that went over the network; 0 where the bucket had it already
    upload_ns: Count


class PassedReport(BaseModel):
    """A checkpoint will not be in the bucket: the disk does not have it any more, or not as it was written."""

    model_config = _STRICT

    kind: Literal["passed"] = "passed"
    serial: Count


class RestReport(BaseModel):
    """What is newest on disk is in the bucket, as was asked for."""

    model_config = _STRICT

    kind: Literal["rest"] = "rest"
    is_end: bool  # asked for by CLOSE: it is the last word


class FailedReport(BaseModel):
    """The saver could not do something; the checkpoints that were durable before still are."""

    model_config = _STRICT

    kind: Literal["failed"] = "failed"
    sequence: Count
    message: Annotated[str, BeforeValidator(plain), Field(max_length=MAX_TEXT)]


class Notice(BaseModel):
    """What a person should know and no promise is broken by: something is tried again, or works again."""

    model_config = _STRICT

    kind: Literal["notice"] = "notice"
    message: Annotated[str, BeforeValidator(plain), Field(max_length=MAX_TEXT)]


Message = DurableReport | VerifiedReport | UploadedReport | PassedReport | RestReport | FailedReport | Notice
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    return message.model_dump_json().encode()


def receive(end: socket.socket) -> Message | None:
    """The next message; None where there is none now. Raises EOFError once the other end is gone."""
    try:
        packet = end.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        raise EOFError from None
    if not packet:
        raise EOFError
    try:
        return _MESSAGE.validate_json(packet)
    except ValidationError:
        return FailedReport(sequence=0, message=f"the saver sent what is no message: {packet[:80]!r}")


def send(end: socket.socket, packet: bytes) -> bool:
    """Whether the packet was taken; never waits."""
    try:
        end.send(packet, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        return False
    return True
