"""The whole lines that a growing file gained since it was last asked, and the last lines of a log."""

import os
from pathlib import Path

_FINGERPRINT_BYTES = 64  # of what was read last, by which a file that was rewritten in place is told from one that grew


class LineTail:
    """Follows a file that another process appends to, without opening it for longer than a read.

    A last line without its newline waits until it is whole. A file that was replaced, shortened or rewritten is read again from its
    beginning; one that is absent has no lines yet.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._forget()

    def _forget(self) -> None:
        self._offset, self._before, self._file = 0, b"", None

    def read(self) -> tuple[list[bytes], bool]:
        """(new whole lines without their newlines, whether they begin at the file's beginning again: forget the earlier ones).

        Raises OSError where the file cannot be read.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            restarted = self._offset > 0
            self._forget()
            return [], restarted
        with file:
            found = os.fstat(file.fileno())
            file.seek(max(0, self._offset - len(self._before)))
            same = (found.st_dev, found.st_ino) == self._file and file.read(len(self._before)) == self._before
            restarted = self._offset > 0 and not same
            if not same:
                self._forget()
                file.seek(0)
            self._file = found.st_dev, found.st_ino
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-_FINGERPRINT_BYTES:]
        return whole.split(b"\n")[:-1], restarted


def last_lines(path: Path | str, num_lines: int, within_bytes: int = 16_384) -> list[str]:
    """The last lines of a text file, those that begin in its last `within_bytes`; none where there is no file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - within_bytes))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    if size > within_bytes:
        lines = lines[1:]  # the first one is cut
    return lines[-num_lines:] if num_lines > 0 else []
