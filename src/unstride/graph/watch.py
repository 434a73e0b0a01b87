"""Memory that the kernel watches: was anything written there since?

Linux (from 6.7 on) tells which pages of a process were written, whoever wrote them, torch, numpy or C: userfaultfd's
asynchronous write protection and the ioctl PAGEMAP_SCAN, which asks and protects again in one step. 100 MB of weights
are asked for in a tenth of a millisecond, where reading them takes ten. Elsewhere, where a sandbox forbids it, and for
memory that other processes or files stand behind, nothing is watched: who asks must read.
"""

import ctypes
import os
import platform
import struct
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable
from functools import lru_cache
from weakref import WeakValueDictionary

Span = tuple[int, int]  # first address, and the one after the last

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
LEAST = 16  # pages: less is read as soon as asked for
_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # all that an ordinary user may ask for
_API, _FEATURES = 0xAA, 1 << 13 | 1 << 15  # pages that are not there yet, too; faults are settled by the kernel itself
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_WRITES = 1 << 1  # the mode of a registration: writes are watched
_PAGEMAP_SCAN = 0xC0606610
_AGAIN, _ONLY_WATCHED, _WRITTEN = (
    1,
    2,
    1 << 1,
)  # protect what was found; refuse memory that is not watched; found: written
_REGIONS = 16  # that one call tells at the most
_WALK_END = 32  # where in the argument the kernel says how far it came


class Watch:
    """`watch = Watch(spans)`: as long as `watch.writes()` stays the same, nothing was written to `watch.spans`.

    Some or all of the spans may not be watched. Whoever reads the memory asks for the number first: what is written
    while it reads is then told the next time. Safe to use from several threads and several times for the same memory.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.process = os.getpid()
        kernel = _kernel(self.process)
        self._pages = [] if kernel is None else kernel.watched(spans)
        self.spans = [pages.span for pages in self._pages]

    def writes(self) -> int | None:
        """A number that grows when something was written; None where it cannot be said, as in a forked process."""
        kernel = _kernel(self.process) if self._pages and os.getpid() == self.process else None
        return None if kernel is None else kernel.writes(self._pages)


def inner_pages(start: int, end: int) -> Span | None:
    """The whole pages between two addresses, if there are enough of them to be worth watching."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    return (first, last) if last - first >= LEAST * PAGE else None


class _Pages:
    """A span that is watched, and how often something was found to be written there."""

    def __init__(self, span: Span) -> None:
        self.span, self.writes = span, 0


class _Kernel:
    """What is watched in this process, for all who ask: asking clears the kernel's marks, so there is one who does."""

    def __init__(self) -> None:
        number = _SYSCALL.get(platform.machine()) if sys.platform == "linux" else None
        if number is None:
            raise OSError("there is no userfaultfd")
        import fcntl  # not everywhere

        self.ioctl = fcntl.ioctl
        libc = ctypes.CDLL(None, use_errno=True)
        self.faults = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self.faults < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self.ioctl(self.faults, _UFFDIO_API, bytearray(struct.pack("3Q", _API, _FEATURES, 0)))
        self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        self.found = (ctypes.c_uint64 * (3 * _REGIONS))()
        self.lock = threading.Lock()
        self.pages: WeakValueDictionary[Span, _Pages] = WeakValueDictionary()

    def watched(self, spans: Iterable[Span]) -> list[_Pages]:
        """Those of the spans that can be watched; what lies across another span that is watched cannot."""
        with self.lock:
            known = dict(self.pages.items())
            taken, own, found = sorted(known), _own_memory(), list[_Pages]()
            for span in (span for span in sorted(set(spans)) if _within(span, own)):
                pages = known.get(span)
                if pages is None and _apart(span, taken) and self._register(span):
                    pages = self.pages[span] = _Pages(span)
                    insort(taken, span)
                found += [pages] if pages is not None else []
            return found

    def writes(self, pages: list[_Pages]) -> int:
        with self.lock:
            for part in pages:
                part.writes += self._written(part.span)
            return sum(part.writes for part in pages)

    def _written(self, span: Span) -> bool:
        """Whether something was written there since it was last asked for; from now on anew."""
        try:
            return self._scan(span)
        except OSError:  # other memory lies there now
            self._register(span)
            return True

    def _register(self, span: Span) -> bool:
        start, end = span
        try:
            self.ioctl(self.faults, _UFFDIO_REGISTER, bytearray(struct.pack("4Q", start, end - start, _WRITES, 0)))
            self._scan(span)
        except OSError:
            return False
        return True

    def _scan(self, span: Span) -> bool:
        (at, end), written = span, False
        while at < end:
            found = (ctypes.addressof(self.found), _REGIONS, 0)
            asked = (96, _AGAIN | _ONLY_WATCHED, at, end, 0, *found, 0, _WRITTEN, 0, _WRITTEN)
            argument = bytearray(struct.pack("12Q", *asked))
            written |= self.ioctl(self.pagemap, _PAGEMAP_SCAN, argument) > 0
            (at,) = struct.unpack_from("Q", argument, _WALK_END)
        return written


@lru_cache(1)
def _kernel(process: int) -> _Kernel | None:
    """Of this process; a forked one has memory of its own."""
    try:
        return _Kernel()
    except OSError:
        return None


def _own_memory() -> list[Span]:
    """Where this process alone writes: neither files nor memory that is shared with others."""
    found: list[Span] = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            where, access, _, _, inode = line.split(None, 5)[:5]
            if access == "rw-p" and inode == "0":
                start, end = (int(part, 16) for part in where.split("-"))
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, end))
    return found


def _within(span: Span, regions: list[Span]) -> bool:
    at = bisect_right(regions, (span[0], sys.maxsize)) - 1
    return at >= 0 and span[1] <= regions[at][1]


def _apart(span: Span, taken: list[Span]) -> bool:
    at = bisect_right(taken, span)
    return (at == 0 or taken[at - 1][1] <= span[0]) and (at == len(taken) or span[1] <= taken[at][0])
