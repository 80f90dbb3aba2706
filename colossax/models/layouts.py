"""How a foreign tensor orders, merges and joins the dims of our parameters."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

PART = "part"
_OR, _OVER, _ONE = "|", "/", "1"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Order of a foreign tensor's dims, in our dim names: `(heads head_dim) embed`.

    Names in parentheses are merged into one dim. `part` counts parameters that one tensor holds
    together: `embed (part heads head_dim)` is q, k and v side by side, `(heads part head_dim)
    embed` has them head by head. `1` is a dim of theirs alone. Parts of unlike sizes lie one after
    another where a name has `|`: `(heads|kv_heads|kv_heads head_dim) embed`, or
    `(kv_heads heads/kv_heads|1|1 head_dim) embed`, where each kv head has its queries, its key and
    its value.
    """

    text: str

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Dim names per foreign dim."""
        matches = re.findall(r"\(([^)]*)\)|(\S+)", self.text)
        return tuple(tuple((merged or single).split()) for merged, single in matches)

    @property
    def names(self) -> tuple[str, ...]:
        """All dim names in the order in which the foreign tensor stores them."""
        return tuple(name for group in self.groups for name in group if name != _ONE)

    @property
    def unlike(self) -> str | None:
        """The name at which parts of unlike sizes lie one after another, if any."""
        return next((name for name in self.names if _OR in name), None)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the foreign tensor."""
        return tuple(math.prod(_size(name, sizes) for name in group) for group in self.groups)

    def ours(self, foreign: np.ndarray, dims: Sequence[str], sizes: Mapping[str, int]) -> list:
        """Our arrays, dims in the order `dims`, as views of a foreign tensor."""
        spread = foreign.reshape([_size(name, sizes) for name in self.names])
        if self.unlike is not None:
            return self._taken_apart(spread, dims, sizes)
        if PART not in self.names:
            return [spread.transpose([self.names.index(dim) for dim in dims])]
        order = [self.names.index(name) for name in (PART, *dims)]
        return list(spread.transpose(order))

    def foreign(self, ours: Sequence[np.ndarray], dims: Sequence[str]) -> np.ndarray:
        """The foreign tensor; copies only when dims must move."""
        if self.unlike is not None:
            return self._put_together(ours, dims)
        merged = np.stack(ours) if PART in self.names else ours[0]
        names = (PART, *dims) if PART in self.names else tuple(dims)
        spread = merged.transpose([names.index(name) for name in self.names])
        sizes = dict(zip(names, merged.shape, strict=True))
        return spread.reshape(self.shape(sizes))

    def _parts(self, dims: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
        """Of each part of unlike sizes: its name at their place, its dims as here, and as ours.

        Args:
            dims: Of the first part, in our order; those of the others have their own name of heads.
        """
        assert self.unlike is not None
        at = self.names.index(self.unlike)
        found = []
        for which in self.unlike.split(_OR):
            whole, _, shared = which.partition(_OVER)
            heads = [*self.names[:at], *([] if which == _ONE else [whole])]
            if shared:  # one dim of ours is two of theirs
                heads.remove(shared)
            here = [*heads, *self.names[at + 1 :]]
            ours = [dim if dim in here else heads[-1] for dim in dims]
            found.append((which, here, ours))
        return found

    def _taken_apart(
        self, spread: np.ndarray, dims: Sequence[str], sizes: Mapping[str, int]
    ) -> list[np.ndarray]:
        assert self.unlike is not None
        at, arrays, start = self.names.index(self.unlike), [], 0
        for which, here, ours in self._parts(dims):
            size = _size(which, sizes)
            taken = spread[(slice(None),) * at + (slice(start, start + size),)]
            start += size
            whole = taken.reshape([sizes[name] for name in here])
            arrays.append(whole.transpose([here.index(dim) for dim in ours]))
        return arrays

    def _put_together(self, ours: Sequence[np.ndarray], dims: Sequence[str]) -> np.ndarray:
        assert self.unlike is not None
        parts, sizes = self._parts(dims), dict[str, int]()
        for array, (_, _, own) in zip(ours, parts, strict=True):
            sizes |= dict(zip(own, array.shape, strict=True))
        spread = []
        for array, (which, here, own) in zip(ours, parts, strict=True):
            turned = array.transpose([own.index(name) for name in here])
            theirs = [which if name == self.unlike else name for name in self.names]
            spread.append(turned.reshape([_size(name, sizes) for name in theirs]))
        joined = np.concatenate(spread, axis=self.names.index(self.unlike))
        return joined.reshape(self.shape(sizes))


def _size(name: str, sizes: Mapping[str, int]) -> int:
    """Of a name of a layout, `a|b` and `a/b` included."""
    if _OR in name:
        return sum(_size(one, sizes) for one in name.split(_OR))
    whole, _, shared = name.partition(_OVER)
    if whole == _ONE:
        return 1
    return sizes[whole] // (sizes[shared] if shared else 1)
