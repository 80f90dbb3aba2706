"""What packed forms of matrices stand for, one number after another, and models made of that."""

import functools

import jax
import ml_dtypes
import numpy as np

from tests.inference.weights.made import golden, written

F32, BF16 = np.float32, ml_dtypes.bfloat16


def grouped(w, group, *, zeros):
    """Codes, scales and zeros of a matrix `[k, n]`, and what they stand for in float64."""
    k, n = w.shape
    codes, values = np.zeros((k, n), np.uint8), np.zeros((k, n))
    scales, zero = np.zeros((k // group, n), BF16), np.full((k // group, n), 8, np.uint8)
    for g in range(k // group):
        for column in range(n):
            own = [F32(x) for x in w[g * group : (g + 1) * group, column]]
            if zeros:
                least, most = min(F32(0), *own), max(F32(0), *own)
                scale = BF16((most - least) * F32(1 / 15))
            else:
                least, scale = F32(0), BF16(2 * max(abs(x) for x in own) * F32(1 / 15))
            by = F32(1) / (F32(scale) if scale > 0 else F32(1))
            if zeros:
                zero[g, column] = min(15, max(0, np.round(-least * by)))
            scales[g, column] = scale
            for i, x in enumerate(own):
                code = np.round(x * by) + zero[g, column]
                codes[g * group + i, column] = min(15, max(0, code))
                whole = int(codes[g * group + i, column]) - int(zero[g, column])
                values[g * group + i, column] = whole * float(scale)
    return codes, scales, zero, values


def thinned(w, kept):
    """A matrix `[k, n]` of which only the largest of each four inputs are left."""
    values = np.zeros_like(w)
    for first in range(0, w.shape[0], 4):
        for column in range(w.shape[1]):
            four = list(range(first, first + 4))
            largest = sorted(four, key=lambda i: (-abs(w[i, column]), i))[:kept]
            values[largest, column] = w[largest, column]
    return values


@functools.cache
def _form(form):
    name, _, group = form.partition(":") if form.startswith("int4") else (form, "", "0")
    return name, int(group)


def stands_for(w, contract, form):
    """What is kept of a layer's matrix `[*in, *out]`, in its own type and shape."""
    name, group = _form(form)
    flat = w.reshape(int(np.prod(w.shape[:contract])), -1)
    if name.startswith("int4"):
        found = grouped(flat, group, zeros=name == "int4")[3]
    else:
        found = thinned(flat, int(name[0]))
    return found.astype(w.dtype).reshape(w.shape)


def is_map(info):
    """Whether a parameter is the matrix of a map of a layer."""
    *_, of, name = ("", *info.path.split("/"))
    return info.first_layer is not None and name == "w" and of not in ("router", "shared_gate")


def contracted(info):
    """How many of its dims are of the input."""
    return 2 if info.path.endswith("/o/w") else 1


def model_of(folder, case, form):
    """A checkpoint of what is kept of a golden family's matrices."""
    config, spec, params = golden(case)

    def through(info, w):
        if not is_map(info):
            return w
        if info.stacked:
            return np.stack([stands_for(row, contracted(info), form) for row in w])
        return stands_for(w, contracted(info), form)

    where = folder / f"{case}-{form.replace(':', '-')}-stood-for"
    return written(where, config, spec, jax.tree.map(through, spec.infos, params))
