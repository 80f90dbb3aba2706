"""The pool of pages: who refers to which, and which can be had."""

from collections.abc import Sequence

from colossax.scheduling.prefixes import Prefixes


class Pool:
    """Pages by number, each of them free, referenced, or kept as a prefix.

    A page that is let go may be had again at once, though a step that writes it is still on its
    way: steps run on the device in the order in which they were planned, so what writes it for
    its next holder comes after all that its last one had planned.
    """

    def __init__(self, pages: int, prefixes: Prefixes):
        """All of them free.

        Args:
            pages: How many.
            prefixes: Those that have keys.
        """
        self._references = [0] * pages
        self._free = list(range(pages))[::-1]
        self._prefixes = prefixes

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody refers to, kept as prefixes."""
        return self._prefixes.idle

    @property
    def referenced(self) -> int:
        """Pages that somebody refers to."""
        return len(self._references) - self.available

    @property
    def available(self) -> int:
        """Pages that can be had."""
        return len(self._free) + self._prefixes.idle

    def references(self, page: int) -> int:
        """How many refer to it."""
        return self._references[page]

    def take(self) -> int | None:
        """A page to write to: a free one, else the least recently used prefix; None: all in use."""
        page = self._free.pop() if self._free else self._prefixes.forget()
        if page is not None:
            self._references[page] = 1
        return page

    def refer(self, page: int) -> None:
        """One more refers to a page with a key."""
        if not self._references[page]:
            self._prefixes.wake(page)
        self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One less refers to each of these, the pages of one request in its order."""
        for page in reversed(pages):  # deepest first: see Prefixes
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._prefixes.named(page):
                self._prefixes.rest(page)
            else:
                self._free.append(page)
