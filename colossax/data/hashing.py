"""Random numbers that are a function of their names: equal on every machine and numpy version."""

import numpy as np

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def keyed_uint64(*key: int, count: int) -> np.ndarray:
    """`count` well-mixed uint64, the output of SplitMix64 from a state made of the key.

    Reference: Steele et al. 2014, Fast Splittable Pseudorandom Number Generators.
    """
    state = 0
    for part in key:
        state = int(_mixed(np.array([(state ^ part) + _GOLDEN & _MASK], np.uint64))[0])
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _mixed(steps + np.uint64(state))


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return z ^ (z >> np.uint64(31))


def lowest(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which of uint64 hashes, as numbers in [0, 1), lie below a share."""
    return hashes.astype(np.float64) / 2.0**64 < share


def keyed_permutation(*key: int, count: int) -> np.ndarray:
    """A permutation of `range(count)`, int64: the order of `keyed_uint64`. Cost: one sort."""
    return np.argsort(keyed_uint64(*key, count=count), kind="stable")
