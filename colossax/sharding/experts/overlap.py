"""In how many chunks rows go to experts, so that most of the way is hidden by computation."""

from colossax.config.experts import ExpertRates

MOST_CHUNKS = 16
"""Further ones cost more to begin than they hide."""

CHUNK_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
"""What the compiler must be told: rows, weights and gradients of a chunk are on their way at once,
and those of another come back, while one is computed."""


def chunked_seconds(chunks: int, exchange_s: float, compute_s: float) -> float:
    """What chunks take, each sent, computed and sent back; a chunk's exchange is one way.

    While one is computed, the next is sent and the one before comes back, and what begins together
    ends together, as in a loop:

        T(1) = 2 a + f,    T(r) = 2 a + 2 max(a, f) + (r - 2) max(2 a, f)

    Where computation takes longer than both exchanges this is `2 a + r f`, and it is never more
    than `max(2 r a + f, 2 a + r f)`, that of two queues without an order (Pan et al. 2025, FSMoE).
    """
    if chunks == 1:
        return 2 * exchange_s + compute_s
    ends = 2 * exchange_s + 2 * max(exchange_s, compute_s)
    return ends + (chunks - 2) * max(2 * exchange_s, compute_s)


def best_chunks(rates: ExpertRates, sent_bytes: float, flops: float) -> int:
    """The number of chunks that takes least time; of equal ones the smallest.

    Args:
        rates: Of a device.
        sent_bytes: By a device, one way, all chunks together.
        flops: Of a device's experts for what it then has.
    """

    def seconds(chunks: int) -> float:
        exchange = rates.exchange_s + sent_bytes / chunks / rates.bytes_per_s
        return chunked_seconds(
            chunks, exchange, rates.compute_s + flops / chunks / rates.flops_per_s
        )

    return min(range(1, MOST_CHUNKS + 1), key=seconds)
