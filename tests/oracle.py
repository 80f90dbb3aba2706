"""What "equal to one device" means."""

import jax
import numpy as np

LOSS_TOLERANCE = 1e-5


def assert_trees_close(got, want, *, tolerance=1e-5):
    """Each leaf's max|diff| <= tolerance * max(its max|want|, 1e-3 max|want| over all leaves).

    Some gradients (of key biases) are zero in exact arithmetic: what is wanted is rounding alone,
    below one float32 step (1.2e-7) of the largest leaf, and another machine's code rounds
    otherwise. There any difference up to that step is none.
    """
    wanted = jax.tree_util.tree_flatten_with_path(want)[0]
    found = jax.tree.leaves(got)
    assert len(found) == len(wanted)
    largest = max(float(np.max(np.abs(leaf))) for _, leaf in wanted)
    for leaf, (path, reference) in zip(found, wanted, strict=True):
        leaf, reference = np.asarray(leaf, np.float64), np.asarray(reference, np.float64)
        bound = tolerance * max(np.max(np.abs(reference)), 1e-3 * largest)
        step = np.finfo(np.float32).eps * largest
        if tolerance and 0 < np.max(np.abs(reference)) <= step:
            bound = step
        worst = np.max(np.abs(leaf - reference))
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: {worst:.2e} > {bound:.2e}"


def assert_losses_close(got, want, *, tolerance=LOSS_TOLERANCE):
    """Relative difference of each number at most the tolerance."""
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=tolerance)


def factorisations(devices, axes):
    """Every way to write `devices` as an ordered product over the axes."""
    if len(axes) == 1:
        return [{axes[0]: devices}]
    return [
        {axes[0]: size, **rest}
        for size in range(1, devices + 1)
        if devices % size == 0
        for rest in factorisations(devices // size, axes[1:])
    ]
