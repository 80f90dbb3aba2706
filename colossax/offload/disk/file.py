"""One preallocated file, read and written past the page cache in whole blocks."""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from colossax.errors import DamagedStoreError, OffloadError
from colossax.offload.disk.layout import BLOCK_BYTES

CALL_BYTES = 1 << 30
"""Most that is asked of the system at once; it moves no more than 2 GiB less a page."""

_REMEDIES = {
    errno.ENOSPC: "make room or choose another folder",
    errno.EDQUOT: "make room within the quota or choose another folder",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f) or choose another filesystem",
    errno.EROFS: "mount the filesystem for writing or choose another folder",
    errno.EACCES: "grant the right to write or choose another folder",
    errno.EPERM: "grant the right to write or choose another folder",
    errno.ENOENT: "create the folder or choose another",
    errno.EIO: "check the disk or choose another",
}


class BlockFile:
    """A file open for reading and writing by this process alone.

    Attributes:
        path: Where.
        direct: Whether reads and writes go past the page cache (O_DIRECT). Where the filesystem
            refuses that they pass through it, and what they leave there is dropped at once.
    """

    def __init__(self, path: Path, *, create: bool, direct: bool = True) -> None:
        """Open and lock a file.

        Args:
            path: An existing file, or one to create; in that case what is there is emptied.
            create: Which of the two.
            direct: Whether to try O_DIRECT.

        Raises:
            OffloadError: It is missing, may not be written, or another process has it open.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0))
        except OSError as error:
            raise self.failed("opened", error) from error
        try:
            self._lock()
            if create:
                os.ftruncate(self._fd, 0)
            self.direct = direct and self._turn_direct()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OffloadError(
                f"disk store '{self.path}' is open in another process; wait until that ends or "
                "give each process a file of its own"
            ) from error

    def _turn_direct(self) -> bool:
        """Try O_DIRECT and a read with it: some filesystems refuse the one, some the other."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [aligned_buffer(BLOCK_BYTES).data], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise self.failed("read", error) from error
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._fd).st_size

    def allocate(self, size_bytes: int) -> None:
        """Take the disk space for a file of this size.

        Raises:
            OffloadError: There is not as much; nothing was written.
        """
        free = free_bytes(self.path.parent)
        if size_bytes > free:
            raise OffloadError(
                f"disk store '{self.path}' needs {size_bytes} bytes and its filesystem has {free} "
                "free; make room or choose another folder"
            )
        try:
            os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as error:
            raise self.failed(f"given {size_bytes} bytes", error) from error
        self.direct = self.direct and self._turn_direct()  # an empty file tells less

    def read(self, buffer: np.ndarray, offset: int) -> None:
        """Fill a buffer, uint8 and aligned as `aligned_buffer` makes them, from a byte on.

        Raises:
            OffloadError: The system refuses.
            DamagedStoreError: The file ends before.
        """
        done = 0
        while done < len(buffer):
            part = buffer[done : done + CALL_BYTES]
            try:
                count = os.preadv(self._fd, [part.data], offset + done)
            except OSError as error:
                raise self.failed("read", error) from error
            if not count:
                raise DamagedStoreError(
                    f"disk store '{self.path}' ends at byte {self.size_bytes}, before "
                    f"{offset + done} which belongs to it; delete it and restore from the last "
                    "checkpoint",
                    path=str(self.path),
                )
            done += count
        self._forget(offset, len(buffer))

    def write(self, buffer: np.ndarray, offset: int) -> None:
        """Write a buffer, aligned as `aligned_buffer` makes them, from a byte on.

        Raises:
            OffloadError: The system refuses; part of it may be written.
        """
        done = 0
        try:
            while done < len(buffer):
                part = buffer[done : done + CALL_BYTES]
                done += os.pwritev(self._fd, [part.data], offset + done)
            if (
                not self.direct
            ):  # else the page cache would grow by what is to be kept out of memory
                os.fdatasync(self._fd)
        except OSError as error:
            raise self.failed("written", error) from error
        self._forget(offset, len(buffer))

    def _forget(self, offset: int, size_bytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync(self) -> None:
        """Return when all that was written is on the disk.

        Raises:
            OffloadError: The system refuses; what was written since the last time may be lost.
        """
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise self.failed("written", error) from error

    def rename(self, path: Path) -> None:
        """Give the file its name, on the disk too.

        Raises:
            OffloadError: The system refuses.
        """
        try:
            os.rename(self.path, path)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self.failed(f"renamed to '{path.name}'", error) from error
        self.path = path

    def failed(self, verb: str, error: OSError) -> OffloadError:
        """One sentence for what the system said."""
        remedy = _REMEDIES.get(error.errno or 0, "check the disk or choose another")
        return OffloadError(
            f"disk store '{self.path}' cannot be {verb} ({error.strerror}); {remedy}"
        )

    def close(self) -> None:
        """Close the file, and so unlock it; again is nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "BlockFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def aligned_buffer(size_bytes: int) -> np.ndarray:
    """uint8[size_bytes] of zeros that begins on a page, so that disks can reach it themselves.

    Huge pages, where the system has them: a disk is told of one address in place of 512. Children
    of a fork do not get it: their copy could take the place of the page a disk is writing into.
    """
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        try:
            pages.madvise(advice)
        except OSError as error:  # a kernel without huge pages
            if error.errno != errno.EINVAL:
                raise
    return np.frombuffer(pages, np.uint8)[:size_bytes]


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the filesystem of a folder.

    Raises:
        OffloadError: There is no such folder.
    """
    try:
        stats = os.statvfs(folder)
    except OSError as error:
        raise OffloadError(
            f"folder '{folder}' cannot hold a disk store ({error.strerror}); create it or choose "
            "another"
        ) from error
    return stats.f_bavail * stats.f_frsize
