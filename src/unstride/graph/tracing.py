"""What surrounds torch.export while it traces a model."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

_LOCK = threading.RLock()  # export changes torch itself while it traces, for all threads
_EXPORTERS: list[int] = []  # the thread that has the lock


class _Silenced:
    """A stream that drops what one thread writes, and passes on what the others write."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def filter(self, record: logging.LogRecord) -> bool:
        """The same for log records."""
        return record.thread != self.thread


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Export prints whole graphs when it fails; what the user needs is in our error. Other threads are not affected."""
    silenced: Any = _Silenced(sys.stderr or io.StringIO())
    names = [name for name in [*logging.root.manager.loggerDict] if name.partition(".")[0] == "torch"]
    loggers = [logging.root, *map(logging.getLogger, names)]
    handlers = dict.fromkeys(h for logger in loggers for h in logger.handlers)
    for handler in handlers:
        handler.addFilter(silenced.filter)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(silenced):
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(silenced.filter)


def exporting() -> bool:
    """Whether this very call is exported or traced. Torch's own flag is of all threads, and captures export, too."""
    if torch.jit.is_tracing():
        return True
    own_export = torch.compiler.is_exporting() and (not _EXPORTERS or _EXPORTERS[-1] == threading.get_ident())
    return own_export and torch.compiler.is_exporting()  # a capture may have ended between the two questions


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Around an export: one thread at a time, silent, and known as the thread that exports."""
    with _LOCK, _without_output():
        _EXPORTERS.append(threading.get_ident())
        try:
            yield
        finally:
            _EXPORTERS.pop()
