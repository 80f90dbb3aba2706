"""What the proof of a kernel has found, and what that means for a choice."""

import dataclasses
import enum
import statistics
from collections.abc import Mapping
from typing import Any, ClassVar

SLOWER = 1.03
"""A kernel that takes more than this times as long as its peer is not worth taking."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What selects compiled kernels among those of an operation; its text is its name.

    Fields are scalars: a variant is a key, and travels as JSON.
    """

    operation: ClassVar[str]


class Outcome(enum.StrEnum):
    """How a proof has ended."""

    PROVED = "proved"
    DECLINED = "declined"
    UNDECIDED = "undecided"
    """It says nothing of the kernel, and is not kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the proof of one variant on one kind of device has found.

    Attributes:
        outcome: How it ended.
        reason: Why it is not proved; else empty.
        seconds: Of a call in the larger case, one for each repeat.
        peers: The same of the implementations that would be taken in its place.
    """

    outcome: Outcome
    reason: str = ""
    seconds: tuple[float, ...] = ()
    peers: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def declined(cls, reason: str) -> "Verdict":
        """The kernel is wrong, crashes or hangs."""
        return cls(outcome=Outcome.DECLINED, reason=reason)

    @classmethod
    def undecided(cls, reason: str) -> "Verdict":
        """The proof could not be made."""
        return cls(outcome=Outcome.UNDECIDED, reason=reason)

    def why_not(self, peer: str | None) -> str | None:
        """Why a call should go to `peer` instead, or None."""
        if self.outcome is Outcome.UNDECIDED:
            return f"not proved on this device: {self.reason}"
        if self.outcome is Outcome.DECLINED:
            return f"declined by its proof on this device: {self.reason}"
        return self._why_slow(peer)

    def _why_slow(self, peer: str | None) -> str | None:
        """Slower in the median by more than `SLOWER`, and in every repeat: noise is neither."""
        theirs = self.peers.get(peer or "")
        if not theirs or not self.seconds or min(self.seconds) <= max(theirs):
            return None
        ratio = statistics.median(self.seconds) / statistics.median(theirs)
        if ratio <= SLOWER:
            return None
        return f"right on this device, but it takes {ratio:.2f} times as long as {peer}"

    @property
    def text(self) -> str:
        """For people."""
        if self.outcome is not Outcome.PROVED:
            return f"{self.outcome}: {self.reason}"
        time = statistics.median(self.seconds) if self.seconds else 0.0
        rates = [f"{statistics.median(s) / time:.2f} of {n}" for n, s in self.peers.items() if time]
        return f"proved{', rate ' if rates else ''}{', '.join(rates)}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "outcome": str(self.outcome),
            "reason": self.reason,
            "seconds": list(self.seconds),
            "peers": {name: list(seconds) for name, seconds in self.peers.items()},
        }

    @classmethod
    def from_json(cls, fields: Any) -> "Verdict":
        """The verdict that `to_json` wrote.

        Raises:
            ValueError: It is none.
        """
        try:
            return cls(
                outcome=Outcome(fields["outcome"]),
                reason=str(fields["reason"]),
                seconds=tuple(float(s) for s in fields["seconds"]),
                peers={str(n): tuple(float(s) for s in of) for n, of in fields["peers"].items()},
            )
        except (TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"no verdict: {problem!r}") from problem
