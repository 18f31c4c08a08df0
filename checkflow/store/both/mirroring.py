"""What a rank and the mirror of its slots say to each other, from machine to machine.

    rank:    Hello, configuration                                  mirror: Answer
    rank:    Begin, record, the slot's bytes in blocks, Commit     mirror: Answer

by multiprocessing.connection, whose two ends prove to each other that they know a key. What is said is not encrypted,
as torch's collectives are not. The hash of each block goes with it, and is compared where it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from checkflow.counts import Count, Positive
from checkflow.store.format.manifest import BLOCK_BYTES
from checkflow.text import plain

MAX_MESSAGE_BYTES = 2**30  # of hashes, for a slot of a petabyte
MAX_CONFIG_BYTES = 2**30
MAX_TEXT = 4096
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Hello(BaseModel):
    """Slots are to be mirrored that are like these. The configuration follows."""

    model_config = _STRICT

    kind: Literal["hello"] = "hello"
    rank: Count
    size: Positive
    slots: Positive
    record_room_bytes: Count


class Begin(BaseModel):
    """A slot follows: its record, and its bytes in blocks. `needs`: as of SharedMemory. `agreed`: of these slots every
    rank has staged a checkpoint, so that those before them are needed no more."""

    model_config = _STRICT

    kind: Literal["begin"] = "begin"
    slot: Count
    sequence: Positive
    iteration: Count
    needs: Count
    agreed: bool


class Commit(BaseModel):
    """It was all of it, `whole` if the slot still held it then; `blocks`: the hash of each, and the record's."""

    model_config = _STRICT

    kind: Literal["commit"] = "commit"
    whole: bool
    blocks: str
    record: str


class Answer(BaseModel):
    """Whether the mirror has it, and why not."""

    model_config = _STRICT

    kind: Literal["answer"] = "answer"
    why_not: Annotated[str, BeforeValidator(plain), Field(max_length=MAX_TEXT)] = ""


Said = Hello | Begin | Commit | Answer
_SAID: TypeAdapter[Said] = TypeAdapter(Annotated[Said, Field(discriminator="kind")])
message = TypeVar("message", Hello, Begin, Commit, Answer)


def say(connection: Connection, said: Said) -> None:
    """Raises OSError where the other end is gone."""
    connection.send_bytes(said.model_dump_json().encode())


def hear(connection: Connection, kind: type[message]) -> message:
    """The next message. Raises OSError where the other end is gone, or says something else."""
    try:
        said = _SAID.validate_json(connection.recv_bytes(MAX_MESSAGE_BYTES))
    except EOFError:
        raise ConnectionResetError("the other end is gone") from None
    except ValidationError:
        raise ConnectionAbortedError("the other end says what is no message") from None
    if not isinstance(said, kind):
        raise ConnectionAbortedError(f"the other end says {said.kind} out of turn")
    return said


def blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Of 4 MiB each, the last one shorter."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
