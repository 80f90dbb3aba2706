"""Which tokens of a sequence a rank holds, and which ranks' tokens it sees."""

import enum

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from colossax.pallas.attention import Mask


class Order(enum.StrEnum):
    """How a sequence of S tokens lies on R ranks.

    `contiguous`: rank r holds tokens `[r S / R, (r + 1) S / R)`. Under a causal mask the last rank
    then has about twice the average work, and everyone waits for it.

    `zigzag`: of 2R chunks rank r holds chunk r, then chunk 2R - 1 - r. Under a causal mask all
    ranks have the same work.
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def zigzag_order(length: int, ranks: int) -> Int[np.ndarray, " length"]:
    """Natural index of the token at each place: `x[zigzag_order(...)]` lays x out for R ranks.

    Raises:
        ValueError: The length is no multiple of twice the ranks.
    """
    if length % (2 * ranks):
        raise ValueError(
            f"zigzag order: {length} tokens do not make 2 x {ranks} equal chunks; pad the sequence"
            f" to a multiple of {2 * ranks} with segment -1"
        )
    return np.concatenate([_indices(rank, length // ranks, ranks) for rank in range(ranks)])


def inverse_order(order: Int[np.ndarray, " length"]) -> Int[np.ndarray, " length"]:
    """Place of each natural index: lays a permuted sequence out as it was."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order), dtype=order.dtype)
    return inverse


def positions_local(
    rank: Int[Array, ""], *, length: int, ranks: int, order: str
) -> Int[Array, "1 length"]:
    """Natural index of each of a rank's tokens."""
    starts = np.asarray(_chunk_starts(length, ranks, order), np.int32)
    chunk = np.arange(length // starts.shape[1], dtype=np.int32)
    return (jnp.asarray(starts)[rank][:, None] + chunk).reshape(1, length)


def check_order(order: str, length: int, ranks: int) -> None:
    """Refuse what is no order, and a shard that zigzag cannot halve.

    Raises:
        ValueError: In those cases.
    """
    if order not in tuple(Order):
        raise ValueError(f"sequence order '{order}' is unknown; use one of {[*map(str, Order)]}")
    if order == Order.ZIGZAG and length % 2:
        raise ValueError(
            f"zigzag order: {length} tokens per rank are no two equal chunks; pad the sequence to"
            f" a multiple of {2 * ranks} with segment -1"
        )


def offsets_seen(mask: Mask, s: int, t: int, ranks: int, order: str) -> tuple[int, ...]:
    """How many places back keys lie that any rank sees, ascending, one's own (0) aside.

    Decided without data, from the window and the chunks of `s` queries and `t` keys per rank; all
    places where the mask speaks of given positions or a prefix.
    """
    if not (mask.indexed and mask.ordered):
        return tuple(range(1, ranks))
    q_low = np.asarray(_chunk_starts(s, ranks, order))[:, None, :, None]
    kv_low = np.asarray(_chunk_starts(t, ranks, order))[None, :, None, :]
    seen = np.ones((ranks, ranks, q_low.shape[2], kv_low.shape[3]), bool)
    if mask.right is not None:
        seen &= kv_low < q_low + s // q_low.shape[2] + mask.right
    if mask.left is not None:
        seen &= kv_low + t // kv_low.shape[3] > q_low - mask.left
    rank, source = np.nonzero(seen.any(axis=(2, 3)))
    return tuple(int(x) for x in np.unique((rank - source) % ranks) if x)


def _chunk_starts(length: int, ranks: int, order: str) -> list[list[int]]:
    """First natural index of each chunk of each rank, with `length` tokens per rank."""
    if order == Order.CONTIGUOUS:
        return [[rank * length] for rank in range(ranks)]
    chunk = length // 2
    return [[rank * chunk, (2 * ranks - 1 - rank) * chunk] for rank in range(ranks)]


def _indices(rank: int, length: int, ranks: int) -> Int[np.ndarray, " length"]:
    chunk = length // 2
    return np.concatenate(
        [start + np.arange(chunk) for start in _chunk_starts(length, ranks, Order.ZIGZAG)[rank]]
    )
