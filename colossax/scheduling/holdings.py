"""The pages that requests hold: taken, found again as prefixes, named, and let go."""

import bisect

from colossax.scheduling.host import Host
from colossax.scheduling.pages import Pool
from colossax.scheduling.prefixes import Prefixes
from colossax.scheduling.running import NOWHERE, Run
from colossax.scheduling.tables import Tables


class Holdings:
    """Pool, prefixes, what of them is in host memory, and tables, in terms of requests."""

    def __init__(
        self,
        *,
        seats: int,
        pages: int,
        page_tokens: int,
        pages_a_seat: int,
        reuse: bool,
        host_pages: int,
    ):
        """All pages free; see `Scheduler`."""
        self._page_tokens, self._reuse = page_tokens, reuse
        self.host = Host(host_pages)
        self.prefixes = Prefixes(self.host)
        self.pool = Pool(pages, self.prefixes)
        self.tables = Tables(seats, pages_a_seat)
        self._coming: set[bytes] = set()

    def cached(self, run: Run) -> int:
        """Pages of a prefix that are there or in host memory, without that of the last token.

        That one is computed.
        """
        run.cached = self.prefixes.longest(run.key, self._most_cached(run), run.cached)
        return run.cached

    def _most_cached(self, run: Run) -> int:
        """Pages that may be found in place of being computed."""
        if run.cap is not None:  # its pages hold what others would not have computed
            return 0
        asked, most = run.request.sampling, len(run.ids) - 1
        if run.scores_from is not None:  # the token before it is fed, whose logits score it
            most = min(most, run.scores_from - 1)
        if asked.presence_penalty or asked.frequency_penalty:
            # What is found is not fed, and penalties count what was fed of what was said.
            most = min(most, len(run.request.prompt))
        return most // self._page_tokens

    def fits(self, run: Run) -> bool:
        """Whether there are pages for a prompt, and one more where it may need one."""
        if run.in_flight:  # it had to leave its seat, and what it said there is not known yet
            return False
        self.cached(run)
        here = self._here(run)
        # Whoever refers to a page refers to those before it.
        idle = here - bisect.bisect_left(
            range(here), True, key=lambda i: not self.pool.references(self._found(run, i))
        )
        wanted = min(self._pages_of(run, len(run.ids)) + 1, self._pages_of(run, run.most))
        return wanted - here <= self.pool.available - idle

    def _here(self, run: Run) -> int:
        """How many of the pages that were found last are on the devices: the first ones."""
        if not self.host.held:
            return run.cached
        return bisect.bisect_left(
            range(run.cached), True, key=lambda i: self.prefixes.page(run.key(i)) is None
        )

    def comes(self, run: Run) -> bool:
        """Whether another computes the next page of its prefix, which it need not do beside it.

        Whoever has begun comes first anyway.
        """
        cached = self.cached(run)
        return cached < self._most_cached(run) and self._next_key(run, cached) in self._coming

    def begin(self, run: Run, seat: int) -> None:
        """Give a seat to a request that fits, and pages for its prompt."""
        cached, here = run.cached, self._here(run)
        for i in range(here):
            run.pages.append(self._found(run, i))
            self.pool.refer(run.pages[i])
        # Claimed before any page is taken, which puts others in the places of the oldest.
        places = [self.host.claim(run.key(i)) for i in range(here, cached)]
        for i in range(here, self._pages_of(run, len(run.ids))):
            page = self.pool.take()
            assert page is not None
            run.pages.append(page)
            if i < cached:
                self.prefixes.name(page, run.key(i))
                self.host.fetch(places[i - here], page)
        run.seat, run.written = seat, cached * self._page_tokens
        run.room = self._room(run)
        run.named, run.next_name = cached, (cached + 1) * self._page_tokens
        self.tables.write(seat, 0, run.pages)
        self._expect(run)

    def grow(self, run: Run) -> bool:
        """Give a request one more page; False where there is none."""
        page = self.pool.take()
        if page is None:
            return False
        self.tables.write(run.seat, len(run.pages), (page,))
        run.pages.append(page)
        run.room = self._room(run)
        return True

    def name(self, run: Run) -> None:
        """Give keys to pages that are full of known tokens, or take the pages that have them."""
        named = self._reuse and run.cap is None
        full = min(run.written, len(run.ids)) // self._page_tokens if named else 0
        if run.seat == NOWHERE or full <= run.named:
            return
        self._coming.discard(run.key(run.named))
        for i in range(run.named, full):
            page = self.prefixes.page(run.key(i))
            if page is None:
                self.prefixes.name(run.pages[i], run.key(i))
                continue
            # Another has computed the same. Two pages of one key would part a page from its parent.
            self.pool.refer(page)
            self.pool.release(run.pages[i : i + 1])
            run.pages[i] = page
            self.tables.write(run.seat, i, (page,))
        run.named, run.next_name = full, (full + 1) * self._page_tokens
        self._expect(run)

    def leave(self, run: Run) -> int:
        """Take seat and pages from a request, whose tokens stay; the seat."""
        self.name(run)
        self._coming.discard(self._next_key(run, run.named))
        self.pool.release(run.pages)
        seat, run.seat, run.pages, run.speaks = run.seat, NOWHERE, [], False
        run.room = run.written = run.named = run.cached = 0
        return seat

    @property
    def counts(self) -> dict[str, int]:
        """Of pages, as `Stats` names them."""
        pool, host = self.pool, self.host
        found = {"free": pool.free, "referenced": pool.referenced, "cached": pool.cached}
        return {**found, "hosted": host.held, "out": host.out, "back": host.back}

    def _expect(self, run: Run) -> None:
        """Note which page of a prompt will have a key next."""
        key = self._next_key(run, run.named)
        if key and self._reuse:
            self._coming.add(key)

    def _next_key(self, run: Run, named: int) -> bytes:
        """The key of the page after so many; none where its tokens are not known."""
        known = run.cap is None and (named + 1) * self._page_tokens <= len(run.ids)
        return run.key(named) if known else b""

    def _found(self, run: Run, i: int) -> int:
        """The page that is known to hold what this one of a request's pages has to."""
        page = self.prefixes.page(run.key(i))
        assert page is not None
        return page

    def _pages_of(self, run: Run, tokens: int) -> int:
        """Those that a request of so many tokens holds."""
        pages = -(-tokens // self._page_tokens)
        return pages if run.cap is None else min(pages, run.cap)

    def _room(self, run: Run) -> int:
        """Tokens that its pages hold; all of its own where they are taken in turn."""
        return run.most if len(run.pages) == run.cap else len(run.pages) * self._page_tokens
