"""Places in host memory for prefixes whose pages were needed for something else."""

from collections import OrderedDict
from typing import TypedDict


class Moves(TypedDict):
    """What is copied before a step, as `StepPlan` names it."""

    out: tuple[tuple[int, int], ...]
    back: tuple[tuple[int, int], ...]


class Host:
    """Which key is in which place, and what is to be copied before the next step.

    A key has a page or a place, never both. Pages go out the deepest first, and a prefix comes back
    from its first page on. So a key that is here has come before those of its parents that are here
    too, and as the oldest is the first to go, whoever is here has all its parents here or in pages.

    Attributes:
        places: Pages that there is memory for; 0: nothing is kept.
        out: Pages that were put here so far.
        back: Pages that were fetched so far.
    """

    def __init__(self, places: int):
        """All of them free."""
        self.places, self.out, self.back = places, 0, 0
        self._free = list(range(places))[::-1]
        self._held: OrderedDict[bytes, int] = OrderedDict()
        self._out: dict[int, int] = {}
        self._back: list[tuple[int, int]] = []

    def __contains__(self, key: bytes) -> bool:
        """Whether a page of this key is here."""
        return key in self._held

    @property
    def held(self) -> int:
        """Pages that are here."""
        return len(self._held)

    def put(self, key: bytes, page: int) -> None:
        """Keep what a page holds, in place of the oldest where none is free.

        Dropped where all places are being read before the next step.
        """
        if self._free:
            place = self._free.pop()
        elif self._held:
            _, place = self._held.popitem(last=False)
        else:
            return
        self._held[key] = place
        self._out[place] = page
        self.out += 1

    def claim(self, key: bytes) -> int:
        """The place of a key that is here; `fetch` is told of it before the next step."""
        return self._held.pop(key)

    def fetch(self, place: int, page: int) -> None:
        """Let a page hold what is in a claimed place, which is free behind the next step's copies.

        Not before: what goes out is copied first, and would be read in its stead.
        """
        self._back.append((place, page))
        self.back += 1

    def forget(self, key: bytes) -> None:
        """Let go of a key that has a page now, as it was computed again."""
        place = self._held.pop(key, None)
        if place is not None:
            self._out.pop(place, None)
            self._free.append(place)

    def moves(self) -> Moves:
        """What is to be copied before the step that is planned; told of once."""
        moves = Moves(
            out=tuple((page, place) for place, page in self._out.items()), back=tuple(self._back)
        )
        self._free += [place for place, _ in self._back]
        self._out.clear()
        self._back.clear()
        return moves
