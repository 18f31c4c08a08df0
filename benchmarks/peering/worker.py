"""A process that trains one workload under one contender, as told over a pipe.

python -m peering.worker WORKLOAD CONTENDER DESCRIPTOR
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import traceback
import warnings
from multiprocessing.connection import Connection

import contenders

import checkflow

from .lives import live
from .orders import Answer, Attach, Build, Detach, Done, Failed, Live, Order, Prepare, Restore, SaveOne, Train
from .session import Session
from .workloads import WORKLOADS, state_bytes

PR_SET_PDEATHSIG = 1


class Worker:
    def __init__(self, workload: str, contender: str) -> None:
        self._workload = workload
        self._kind = contenders.load(contender)
        self._training: checkflow.Training | None = None
        self._session: Session | None = None

    def answer(self, order: Order) -> Answer:
        match order:
            case Prepare(prepared):
                self._kind.prepare(self._workload, prepared)
            case Build():
                self._training = WORKLOADS[self._workload].build()
            case Attach(job):
                if self._training is None:
                    self._training = WORKLOADS[self._workload].build()
                self._session = Session(self._kind, job, self._training)
                gc.freeze()  # else one collection in a while looks at all of torch, 0.2 s in whosever turn it comes
                return Done(state_bytes(self._training), self._kind.version())
            case Train(iterations):
                return self._attached.train(iterations)
            case SaveOne():
                return self._attached.save_one()
            case Restore():
                return self._attached.restore()
            case Live(job, diary):
                live(self._workload, self._kind, job, diary)
            case Detach():
                session, self._session = self._attached, None
                session.close()
                gc.unfreeze()
                training, self._training = self._training, None  # the next one begins from the seed
                assert training is not None
                return Done(state_bytes(training))
        return Done()

    @property
    def _attached(self) -> Session:
        assert self._session is not None, "not attached"
        return self._session


def main(workload: str, contender: str, descriptor: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a frozen worker cannot see that its driver is gone
    warnings.simplefilter("ignore")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what tools print goes to the log
    worker = Worker(workload, contender)
    with Connection(descriptor) as driver:
        while True:
            try:
                order = driver.recv()
            except EOFError:
                return
            try:
                driver.send(worker.answer(order))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 (DCP's errors are not Exceptions; each is a result)
                traceback.print_exc()
                said = str(error).strip().splitlines() or [""]
                driver.send(Failed(f"{type(error).__name__}: {said[0]}"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
