"""Matrices in codes as three packages publish their files: packed one number after another."""

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def put(words, at, code, place, bits):
    """Code number `place` into a word."""
    words[at] |= np.uint32(int(code) << (bits * place))


def drawn(rng, out, inputs, group, bits, scale=np.float16):
    """Codes `[in, out]`, zeros and scales `[groups, out]`; every code there is, 0 among zeros."""
    groups = inputs // group
    codes = rng.integers(0, 2**bits, (inputs, out))
    codes.ravel()[: 2**bits] = np.arange(min(2**bits, codes.size))
    zeros = rng.integers(1, 2**bits - 1, (groups, out))
    return codes, zeros, (rng.random((groups, out)) / 2**bits / 4 + 0.004).astype(scale)


def numbers(codes, zeros, scales, group_of):
    """What they stand for, `[out, in]`, rounded once to the type of the scales."""
    inputs, out = codes.shape
    found = np.zeros((out, inputs), scales.dtype)
    for i in range(inputs):
        for o in range(out):
            g = group_of[i]
            whole = int(codes[i, o]) - int(zeros[g, o])
            found[o, i] = scales.dtype.type(np.float64(whole) * np.float64(scales[g, o]))
    return found


def gptq(rng, out, inputs, *, bits=4, group=8, order=False, second=False, indexed=True):
    """Tensors by the ends of their names, and what they stand for.

    Inputs lie along the words of `qweight`, outputs along those of `qzeros`, whose numbers are one
    less than zeros in the first form of the files.
    """
    group = inputs if group == -1 else group
    codes, zeros, scales = drawn(rng, out, inputs, group, bits)
    if second:
        zeros[0, 0] = 0
    group_of = np.arange(inputs) // group
    if order:
        group_of = rng.permutation(group_of)
    per = 32 // bits
    qweight = np.zeros((inputs // per, out), np.uint32)
    qzeros = np.zeros((len(zeros), out // per), np.uint32)
    for i, o in np.ndindex(codes.shape):
        put(qweight, (i // per, o), codes[i, o], i % per, bits)
    for g, o in np.ndindex(zeros.shape):
        put(qzeros, (g, o // per), zeros[g, o] - (0 if second else 1), o % per, bits)
    found = {"qweight": qweight.view(np.int32), "qzeros": qzeros.view(np.int32), "scales": scales}
    if indexed:
        found["g_idx"] = group_of.astype(np.int32)
    return found, numbers(codes, zeros, scales, group_of)


def awq(rng, out, inputs, *, group=8):
    """Likewise; outputs lie along all words, even ones of eight first."""
    codes, zeros, scales = drawn(rng, out, inputs, group, 4)
    qweight = np.zeros((inputs, out // 8), np.uint32)
    qzeros = np.zeros((len(zeros), out // 8), np.uint32)
    for words, of in ((qweight, codes), (qzeros, zeros)):
        for row, column, place in np.ndindex(*words.shape, 8):
            put(words, (row, column), of[row, 8 * column + _AWQ_ORDER[place]], place, 4)
    found = {"qweight": qweight.view(np.int32), "qzeros": qzeros.view(np.int32), "scales": scales}
    return found, numbers(codes, zeros, scales, np.arange(inputs) // group)


def compressed(rng, out, inputs, *, bits=4, group=8, symmetric=True, order=False):
    """Likewise of `pack-quantized`: whole numbers with a sign, less their least; outputs first."""
    group = inputs if group == -1 else group
    codes, zeros, scales = drawn(rng, out, inputs, group, bits, BF16)
    least = 2 ** (bits - 1)
    if symmetric:
        zeros[:] = least
    per, group_of = 32 // bits, np.arange(inputs) // group
    if order:
        group_of = rng.permutation(group_of)
    packed = np.zeros((out, -(-inputs // per)), np.uint32)
    for i, o in np.ndindex(codes.shape):
        put(packed, (o, i // per), codes[i, o], i % per, bits)
    found = {
        "weight_packed": packed.view(np.int32),
        "weight_shape": np.array([out, inputs], np.int64),
        "weight_scale": np.ascontiguousarray(scales.T),
    }
    if not symmetric:
        words = np.zeros((-(-out // per), len(zeros)), np.uint32)
        for g, o in np.ndindex(zeros.shape):
            put(words, (o // per, g), zeros[g, o], o % per, bits)
        found["weight_zero_point"] = words.view(np.int32)
    if order:
        found["weight_g_idx"] = group_of.astype(np.int32)
    return found, numbers(codes, zeros, scales, group_of)


def in_bytes(rng, out, inputs, *, kind="int8", one=False):
    """Likewise of `int-quantized` and `float-quantized`: a byte each, a scale for each output."""
    scales = (rng.random((1,) if one else (out, 1)) / 64 + 0.004).astype(BF16)
    whole = rng.integers(-128, 128, (out, inputs))
    codes = whole.astype(np.int8) if kind == "int8" else whole.astype(ml_dtypes.float8_e4m3fn)
    found = (codes.astype(np.float64) * scales.astype(np.float64)).astype(BF16)
    return {"weight": codes, "weight_scale": scales}, found
