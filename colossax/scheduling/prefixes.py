"""Full pages by what they hold, so that a prompt that begins like another is not computed twice."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from colossax.scheduling.host import Host

_KEY_BYTES = 16
"""Of 2^40 pages, two have the same key by chance with a probability of 2^-49."""


def root_key(adapter: str | None) -> bytes:
    """The key before the first page: what an adapter computes is no prefix of another's."""
    named = b"" if adapter is None else b"=" + adapter.encode()
    return hashlib.blake2b(named, digest_size=_KEY_BYTES).digest()


def page_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page behind the page of key `parent`."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=_KEY_BYTES).digest()


class Prefixes:
    """Which page has which key, and the order in which unreferenced ones go.

    Whoever refers to a page refers to its parent, and lets go of the deeper page first (`Pool`
    sees to both). So, in the order in which they were let go, a page comes after all that stand
    behind it: the first one is always a leaf, and none has to be searched for.
    """

    def __init__(self, host: Host | None = None):
        """Know none.

        Args:
            host: Where the contents of pages go that are needed for something else.
        """
        self._host = Host(0) if host is None else host
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def idle(self) -> int:
        """Pages that nobody refers to."""
        return len(self._idle)

    def page(self, key: bytes) -> int | None:
        """The page of this key."""
        return self._pages.get(key)

    def named(self, page: int) -> bool:
        """Whether a page has a key."""
        return page in self._keys

    def name(self, page: int, key: bytes) -> None:
        """Give a referenced page its key; there is no other of it."""
        self._host.forget(key)
        self._pages[key] = page
        self._keys[page] = key

    def longest(self, key: Callable[[int], bytes], most: int, known: int) -> int:
        """How many of a prompt's pages, from the first on, are there, or in host memory.

        Args:
            key: Of a page; asked for no more pages than are there, and one, so that a prompt that
                nobody shares is not hashed while it waits.
            most: How many pages count.
            known: What was found before: what has changed since is all that is looked at.
        """
        pages = self._pages
        there = self._anywhere if self._host.held else pages.__contains__
        while known and not there(key(known - 1)):
            known -= 1
        while known < most and there(key(known)):
            known += 1
        return known

    def _anywhere(self, key: bytes) -> bool:
        return key in self._pages or key in self._host

    def rest(self, page: int) -> None:
        """Note that nobody refers to a page with a key any more."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """Note that somebody refers to it again."""
        del self._idle[page]

    def forget(self) -> int | None:
        """The least recently used leaf, whose contents may go to the host; None: all are used."""
        if not self._idle:
            return None
        page, _ = self._idle.popitem(last=False)
        key = self._keys.pop(page)
        del self._pages[key]
        self._host.put(key, page)
        return page
