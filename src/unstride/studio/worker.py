"""One thread that does all heavy work: memory that many threads used in turn would be kept by each of them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Jobs = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class Worker:
    """`Worker().do(compute)` returns or raises what `compute()` does. A daemon: Ctrl-C need not wait for it."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        threading.Thread(target=_work, args=(self._jobs,), daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def do(self, compute: Callable[[], _T]) -> _T:
        answer: Future[_T] = Future()
        self._jobs.put((answer, compute))
        return answer.result()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        answer, compute = job
        try:
            answer.set_result(compute())
        except BaseException as error:  # the caller gets it
            answer.set_exception(error)
        del job, answer, compute  # or the last image would stay in memory until the next one
