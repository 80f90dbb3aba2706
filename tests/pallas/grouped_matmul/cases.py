"""Group sizes of every kind, and what grouped matmuls are in float64."""

import numpy as np

ROWS, GROUPS = 200, 4
"""Rows are no multiple of a tile."""

SIZES = {
    "balanced": [50, 50, 50, 50],
    "zipf": [131, 40, 19, 10],
    "first and middle empty": [0, 128, 0, 72],
    "one has all, last empty": [0, 0, 200, 0],
    "all empty": [0, 0, 0, 0],
    "fewer than rows": [3, 64, 0, 70],
    "three in eight rows": [3, 2, 1, 190],
}


def operands(d, f, seed=0, rows=ROWS, groups=GROUPS):
    """x, w and dy, in float64."""
    rng = np.random.default_rng(seed)
    shapes = (rows, d), (groups, d, f), (rows, f)
    return tuple(rng.normal(size=shape) for shape in shapes)


def truth(x, w, dy, sizes):
    """Output, dx and dw of rows in groups, one group after the other."""
    x, w, dy = (np.asarray(z, np.float64) for z in (x, w, dy))
    out, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], dx[rows], dw[i] = x[rows] @ w[i], dy[rows] @ w[i].T, x[rows].T @ dy[rows]
        start += size
    return out, dx, dw


def error(found, want):
    """Relative, or absolute where nothing is wanted."""
    found = np.asarray(found, np.float64)
    assert found.shape == want.shape
    return np.linalg.norm(found - want) / (np.linalg.norm(want) or 1.0)
