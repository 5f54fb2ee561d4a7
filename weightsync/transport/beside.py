"""A thread beside the one that broadcasts: a trainer packs the next buckets in it, a worker checks the last.

What ends one of the two threads ends the other: an error of a job is raised where its
result is waited for and calls off the broadcast that is under way; a broadcasting thread
that leaves waits for the job that runs. Of two errors the first is raised.

On CUDA each of the two has a stream of its own, which begins behind what the thread that
owns the tensors had asked for. A job's result is there when its stream has done it, so whoever has
that may use what it made on any stream; the thread itself does not wait, and asks for the next job's work
meanwhile, so that the device has no gap between them.

Not covered: a job that never returns (a gather whose peers are gone) is left behind at the
deadline, and its thread ends when it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from weightsync.errors import Aborted, DeadlineExceeded

#: How often a wait looks whether the update was cancelled, seconds.
_LOOK_SECONDS = 0.05
#: How long leaving waits for a job that runs, seconds.
_LEAVE_SECONDS = 5.0

Made = TypeVar("Made")


class Job(Generic[Made]):
    """Something that is done in the other thread."""

    def __init__(self, work: Callable[[], Made]) -> None:
        self._work: Callable[[], Made] | None = work
        self.made: Made
        self.asked: torch.cuda.Event | None = None  # all that it has asked of the device
        self.done = threading.Event()

    def run(self, device: torch.device) -> None:
        """Do it, once; what it works with is let go of."""
        work, self._work = self._work, None
        assert work is not None, "a job is done once"
        self.made, self.asked = work(), now(device)


class Beside:
    """The other thread; a context, in the thread that broadcasts.

    Args:
        name: of the thread.
        device: what jobs work on.
        behind: from `now`; the jobs' stream begins behind it.
        deadline: `time.monotonic()` value; nobody waits longer for a job.
        cancelled: whether the update was ended.
    """

    def __init__(
        self, name: str, device: torch.device, behind: torch.cuda.Event | None, deadline: float, cancelled: Callable[[], bool]
    ) -> None:
        self._device, self._behind, self._deadline, self._cancelled = device, behind, deadline, cancelled
        self._jobs: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._left = False  # jobs that have not begun are not done any more
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        first = self._error  # the broadcast that was under way when a job failed has only been called off
        self._left = True
        self._jobs.put(None)
        self._thread.join(_LEAVE_SECONDS)
        self._error = None
        if exc is not None and first is not None and exc is not first:
            try:
                raise first from exc
            finally:
                del first  # an error must not hold the frame that holds it

    def submit(self, work: Callable[[], Made]) -> Job[Made]:
        """Have this done behind those that were submitted before."""
        job = Job(work)
        self._jobs.put(job)
        return job

    def result(self, job: Job[Made]) -> Made:
        """What a job made; waits for it.

        Raises:
            BaseException: the first that a job raised.
            Aborted, DeadlineExceeded: it was waited for in vain.
        """
        while True:
            if self._cancelled():  # asked also of who never has to wait
                raise Aborted("the update was aborted while its tensors were read or checked")
            if job.done.wait(_LOOK_SECONDS):
                break
            if time.monotonic() > self._deadline:
                raise DeadlineExceeded("reading or checking tensors did not end before the update's deadline")
        if self._error is not None:
            raise self._error
        if job.asked is not None:
            job.asked.synchronize()
        return job.made

    @property
    def alive(self) -> bool:
        """Whether the thread may still be in a job, also one that was left behind."""
        return self._thread.is_alive()

    def ended(self) -> bool:
        """Whether the update was cancelled, or a job has failed; for the broadcasts meanwhile."""
        return self._error is not None or self._cancelled()

    def _run(self) -> None:
        _one_core()
        with on_stream(self._device, self._behind):
            while (job := self._jobs.get()) is not None:
                try:
                    if self._error is None and not self._left:
                        job.run(self._device)
                except BaseException as exc:  # whatever it is, somebody waits
                    self._error = exc
                job.done.set()
            with contextlib.suppress(RuntimeError):
                settle(self._device)  # what a job that failed had begun still uses memory that is let go of now


def _one_core() -> None:
    """Have torch's CPU operations in the calling thread use it alone; other threads keep what they are set to.

    Threads that share an operation wait for each other, and while an engine or a trainer has the cores such a wait lasts
    until its turn comes, in every operation anew. torch's own setting is the process's.
    """
    torch.get_num_threads()  # sets the thread up, which would undo what follows
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


def now(device: torch.device) -> torch.cuda.Event | None:
    """All that the calling thread has asked of a CUDA device so far."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def on_stream(device: torch.device, behind: torch.cuda.Event | None) -> contextlib.AbstractContextManager[object]:
    """A stream of its own for the calling thread, behind what `now` gave; nothing on a CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    if behind is not None:
        stream.wait_event(behind)
    return torch.cuda.stream(stream)


def settle(device: torch.device) -> None:
    """Wait until the calling thread's stream has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
