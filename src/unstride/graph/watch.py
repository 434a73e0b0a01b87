"""Memory that the kernel watches: was anything written there since?

Linux (from 6.7 on) tells which pages of a process were written, by torch, numpy or C: userfaultfd's asynchronous write
protection and the ioctl PAGEMAP_SCAN, which asks and protects again in one step. 100 MB of weights are asked for in a
tenth of a millisecond, where reading them takes ten. Elsewhere, where a sandbox forbids it, and for memory that other
processes or files stand behind, nothing is watched: who asks must read. What a device writes into pinned memory passes
the page tables by: who asks must know.
"""

import ctypes
import os
import platform
import struct
import sys
import threading
from bisect import bisect_right, insort
from collections.abc import Iterable
from weakref import WeakValueDictionary

Span = tuple[int, int]  # first address, and the one after the last

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
LEAST = 16  # pages: less is read as soon as asked for
MOST = 4096  # spans: each splits the memory map, which has a bound
_SYSCALL = {"x86_64": 323, "aarch64": 282}  # userfaultfd
_USER_MODE_ONLY = 1  # all that an ordinary user may ask for
_API, _FEATURES = 0xAA, 1 << 13 | 1 << 15  # pages that are not there yet, too; faults are settled by the kernel itself
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_WRITES = 1 << 1  # the mode of a registration: writes are watched
_PAGEMAP_SCAN = 0xC0606610
_AGAIN = 1 << 0  # protect what was found
_ONLY_WATCHED = 1 << 1  # refuse memory that is not watched
_WRITTEN = 1 << 1  # what is looked for
_REGIONS = 16  # that one call tells at the most
_WALK_END = 32  # where in the argument the kernel says how far it came


class Watch:
    """`watch = Watch(spans)`: as long as `watch.writes()` stays the same, nothing was written to `watch.spans`.

    Some or all of the spans may not be watched. Whoever reads the memory asks for the numbers first: what is written
    while it reads is then told the next time. Safe to use from several threads and several times for the same memory.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._kernel = _kernel()
        self._pages = [] if self._kernel is None else self._kernel.watched(spans)
        self.spans = [pages.span for pages in self._pages]

    def writes(self) -> list[int] | None:
        """Of each span a number that grows when it was written; None where that cannot be said: after a fork."""
        kernel = self._kernel
        return None if kernel is None or kernel.process != os.getpid() else kernel.writes(self._pages)


def available() -> bool:
    """Whether this process can have its memory watched."""
    return _kernel() is not None


def inner_pages(start: int, end: int) -> Span | None:
    """The whole pages between two addresses, if there are enough of them to be worth watching."""
    first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
    return (first, last) if last - first >= LEAST * PAGE else None


class _Pages:
    """A span that is watched, and how often something was found to be written there."""

    def __init__(self, span: Span) -> None:
        self.span, self.writes, self.lost = span, 0, False


class _Kernel:
    """What is watched in this process, for all who ask: asking clears the kernel's marks, so there is one who does."""

    def __init__(self) -> None:
        number = _SYSCALL.get(platform.machine()) if sys.platform == "linux" else None
        if number is None:
            raise OSError("there is no userfaultfd")
        import fcntl  # not everywhere

        self.ioctl, self.process = fcntl.ioctl, os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)
        self.faults = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self.faults < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        try:
            self.ioctl(self.faults, _UFFDIO_API, bytearray(struct.pack("3Q", _API, _FEATURES, 0)))
            self.pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            os.close(self.faults)
            raise
        self.found = (ctypes.c_uint64 * (3 * _REGIONS))()
        self.lock = threading.RLock()  # a signal's handler may ask, too
        self.pages: WeakValueDictionary[Span, _Pages] = WeakValueDictionary()

    def watched(self, spans: Iterable[Span]) -> list[_Pages]:
        """Those of the spans that can be watched; what lies across another span that is watched cannot."""
        with self.lock:
            known = dict(self.pages.items())
            taken, own = sorted(known), _own_memory()
            found: list[_Pages] = []
            for span in sorted(set(spans), key=lambda s: (s[0] - s[1], s)):  # the longest first
                pages = known.get(span)
                if pages is None and len(taken) < MOST and _apart(span, taken) and _within(span, own):
                    if not self._register(span):
                        continue
                    pages = self.pages[span] = _Pages(span)
                    insort(taken, span)
                if pages is not None:
                    found.append(pages)
            return found

    def writes(self, pages: list[_Pages]) -> list[int]:
        with self.lock:
            for part in pages:
                if self._written(part):
                    part.writes += 1
            return [part.writes for part in pages]

    def _written(self, pages: _Pages) -> bool:
        """Whether something was written there since it was last asked for; from now on anew."""
        if not pages.lost:
            try:
                return self._scan(pages.span)
            except OSError:
                pages.lost = True  # other memory lies there now: nobody knows whose
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

    def close(self) -> None:
        """For a forked process, whose memory is its own and watched by nobody."""
        self.process = -1
        for file in (self.faults, self.pagemap):
            os.close(file)


_here: list[_Kernel | None] = []  # of this process, once it was asked for
_opening = threading.RLock()


def _kernel() -> _Kernel | None:
    with _opening:
        if not _here:
            try:
                _here.append(_Kernel())
            except OSError:
                _here.append(None)
        return _here[0]


def _forked() -> None:
    global _opening
    _opening = threading.RLock()  # whoever held it is not here
    while _here:
        kernel = _here.pop()
        if kernel is not None:
            kernel.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _own_memory() -> list[Span]:
    """Where this process alone writes: neither files nor memory that is shared with others."""
    found: list[Span] = []
    try:
        with open("/proc/self/maps") as file:
            lines = file.readlines()
    except OSError:
        return []
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
