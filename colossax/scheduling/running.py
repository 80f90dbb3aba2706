"""What a scheduler knows of one request."""

import dataclasses

from colossax.scheduling.plan import Ended
from colossax.scheduling.prefixes import page_key, root_key
from colossax.scheduling.request import EngineRequest

NOWHERE = -1
"""The seat of a request that has none."""


class Run:
    """A request on its way, in numbers of tokens.

    Attributes:
        number: Its; smaller is older.
        request: As it was asked.
        ids: The tokens that are known: the prompt, and what was said.
        most: How long it may become.
        length: `ids` and the tokens that steps on their way will say, of each at least one.
        written: Tokens whose keys and values have been planned: always the first ones.
        seat: Its, or `NOWHERE`.
        pages: In the order of its tokens.
        room: Tokens that they hold.
        cap: Most pages that it holds; None: as many as its tokens fill.
        named: How many of them, from the first on, have keys.
        next_name: Tokens that must be written for the next page to have one.
        cached: Pages of its prefix that were found last.
        since_s: When it began to wait; None while no step has seen it.
        preempted: Whether it had a seat before.
        speaks: Whether a step is planned that says a token of it in this seat.
        drafts: How many are worth drafting after a token of it.
        hope: Which share of them is said, lately.
    """

    __slots__ = (
        "_keys", "_page_tokens", "cached", "cap", "drafts", "ends", "hope", "ids", "length", "most",
        "named", "next_name", "number", "pages", "preempted", "request", "room", "seat", "since_s",
        "speaks", "waits", "written",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        request: EngineRequest,
        page_tokens: int,
        drafts: int = 0,
        step: int = 1,
    ):
        """Before its first step; `step`: most tokens of one."""
        self.number, self.request = number, request
        keep = request.keep
        self.cap = None if keep is None else keep.pages(page_tokens, step).held
        self.ids = [*request.prompt, *request.generated]
        self.most = len(request.prompt) + request.max_tokens
        self.length = len(self.ids)
        self.ends, self.waits = frozenset(request.ends), request.waits
        self.seat, self.written = NOWHERE, 0
        self.pages: list[int] = []
        self.room = self.named = self.cached = 0
        self.next_name = page_tokens
        self.since_s: float | None = None
        self.preempted = self.speaks = False
        self.drafts = 0 if request.waits else drafts
        self.hope = 1.0
        self._keys: list[bytes] = []
        self._page_tokens = page_tokens

    def fits(self, pages: int) -> bool:
        """Whether so many hold all that it keeps, however long it is."""
        return self.cap is not None and self.cap <= pages

    @property
    def in_flight(self) -> int:
        """Steps on their way that say something of it."""
        return self.length - len(self.ids)

    @property
    def scores_from(self) -> int | None:
        """The first token of the prompt that is scored; None: none is, or all was told."""
        said = len(self.ids) > len(self.request.prompt)
        return None if said else self.request.score_from

    @property
    def end(self) -> Ended | None:
        """Of a request that is over with its last token."""
        if self.ids[-1] in self.ends:
            return Ended(self.number, "stop")
        return Ended(self.number, "length") if len(self.ids) == self.most else None

    def key(self, page: int) -> bytes:
        """The key of one of its pages, whose tokens are known."""
        keys, size = self._keys, self._page_tokens
        while len(keys) <= page:
            parent = keys[-1] if keys else root_key(self.request.adapter)
            start = len(keys) * size
            keys.append(page_key(parent, self.ids[start : start + size]))
        return keys[page]

    def asked(self) -> EngineRequest:
        """The request, with all that it has said as `generated`."""
        said = tuple(self.ids[len(self.request.prompt) :])
        if said == self.request.generated:
            return self.request
        return dataclasses.replace(self.request, generated=said)
