"""A journal written beside the server's event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from colossax.serve.engine.journal import Journal


class Writer:
    """One thread that writes: a slow disk holds up who begins, and nobody who is being told.

    Lines are in the order of these calls. A request is in the file before `begin` returns, so
    before an engine has it; what it is told may reach its client while it is being written.
    """

    def __init__(self, journal: Journal):
        """Of a journal that nobody else writes."""
        self._journal = journal
        self._thread = ThreadPoolExecutor(1, "journal")
        self._closed = False

    async def begin(self, number: int, request: dict[str, Any]) -> None:
        """Wait until a request is in the file.

        Raises:
            OSError: It cannot be written.
        """
        writing = self._thread.submit(self._journal.begin, number, request)
        try:
            await asyncio.wrap_future(writing)
        except asyncio.CancelledError:
            self.told({}, [number])  # behind its beginning, if that was written
            raise

    def told(self, said: dict[int, list[int]], ended: list[int]) -> None:
        """Have written, soon, what requests were told, and which have ended."""
        if not self._closed:
            self._thread.submit(self._journal.told, said, ended)

    def close(self) -> None:
        """Write what there is, and remove the file: nothing is under way."""
        self._closed = True
        self._thread.shutdown()
        self._journal.close()
