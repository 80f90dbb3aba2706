"""Which requests an engine has been handed, and which it gets next."""

from collections import deque
from collections.abc import Iterable

QUIET_DEATHS = 2
"""So many engines that died while a request sat there without a word make it a suspect."""

DEATHS_ALONE = 2
"""So many more engines that died in the same way, the suspects being tried one by one, end it."""


class Handing:
    """As a rule an engine gets all at once; those that may be what kills it, one by one.

    Whoever was being taken up or had a seat when an engine died, and had said nothing there, may be
    why: that counts against it, and a word wipes it out. Who waited for a seat was not run.
    Suspects are handed over last, each when the one before has said something or ended: so the one
    that kills engines is found, and no other pays.
    """

    def __init__(self) -> None:
        self._has: set[int] = set()
        self._silent: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._suspects: deque[int] = deque()
        self._trying: int | None = None

    def has(self, number: int) -> bool:
        """Whether the engine of now was handed this one."""
        return number in self._has

    @property
    def blames(self) -> bool:
        """Whether an engine that died now would count against anybody."""
        return bool(self._silent)

    def opens(self, number: int) -> None:
        """The engine takes a request up: its words, and its grammar, may be what kills it."""
        self._silent.add(number)

    def opened(self, number: int) -> None:
        """It has, and the request waits for a seat."""
        self._silent.discard(number)

    def begin(self, numbers: Iterable[int]) -> list[int]:
        """An engine is ready: what it gets now of those that have not ended."""
        clear, suspects = [], deque()
        for number in numbers:
            suspected = self._deaths.get(number, 0) >= QUIET_DEATHS
            (suspects if suspected else clear).append(number)
        self._suspects = suspects
        return [*self._handed(clear), *self._next()]

    def add(self, number: int) -> list[int]:
        """Likewise, when a request comes."""
        return self._handed([number])

    def said(self, number: int, *, ended: bool = False) -> list[int]:
        """Likewise, when a request has said something or ended."""
        self._silent.discard(number)
        self._deaths.pop(number, None)
        if ended:
            self._has.discard(number)
        return self._next() if number == self._trying else []

    def died(self) -> list[int]:
        """The engine is gone; which requests are not tried again."""
        for number in self._silent:
            self._deaths[number] = self._deaths.get(number, 0) + 1
        most = QUIET_DEATHS + DEATHS_ALONE
        given_up = [number for number in self._silent if self._deaths[number] >= most]
        self._has.clear()
        self._silent.clear()
        self._suspects.clear()
        self._trying = None
        return given_up

    def left(self, number: int) -> None:
        """A request ended that no engine has."""
        self._deaths.pop(number, None)
        if number in self._suspects:
            self._suspects.remove(number)

    def _next(self) -> list[int]:
        self._trying = self._suspects.popleft() if self._suspects else None
        return [] if self._trying is None else self._handed([self._trying])

    def began(self, number: int) -> None:
        """A request has its seat: the engine runs it from now on."""
        self._silent.add(number)

    def _handed(self, numbers: list[int]) -> list[int]:
        self._has.update(numbers)
        return numbers
