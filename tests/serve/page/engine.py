"""An engine that looks alive: few seats, a queue, prompts that take time, pages."""

import asyncio
import dataclasses

from colossax.scheduling import Emitted
from colossax.serve import Stats
from tests.serve.fake import FakeEngine

PAGE = 16


class LivelyEngine(FakeEngine):
    """`FakeEngine` with seats that are waited for.

    Args:
        script: As of `FakeEngine`.
        read_s: Seconds that a prompt takes.
        pages: Of the cache.
    """

    def __init__(self, script=None, *, read_s=0.02, pages=96, **given):
        super().__init__(script, **given)
        self._read_s, self._pages = read_s, pages
        self._seats = asyncio.Semaphore(self.facts.seats)
        self._inside, self._cached, self._hits, self._waiting = {}, 0, 0, 0

    async def _say(self, number, request, queue):
        self._waiting += 1
        try:
            await self._seats.acquire()
        finally:
            self._waiting -= 1
        held = -(-len(request.prompt) // PAGE) + 1
        self._inside[number] = held
        try:
            self._hits += PAGE * (len(request.prompt) // PAGE) * bool(self._cached)
            await queue.put(Emitted(number))
            await asyncio.sleep(self._read_s)
            await super()._say(number, request, queue)
        finally:
            self._seats.release()
            self._cached += self._inside.pop(number)

    def stats(self):
        used = sum(self._inside.values())
        cached = min(self._cached, self._pages - used)
        return dataclasses.replace(
            Stats(),
            seats_used=len(self._inside),
            waiting=self._waiting,
            pages_used=used,
            pages_cached=cached,
            pages_free=self._pages - used - cached,
            prefix_hit_tokens=self._hits,
            idle=not self._inside,
        )
