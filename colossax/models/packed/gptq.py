"""Matrices as GPTQ's and AWQ's packages store them: eight or four codes in a word of 32 bits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from colossax.models.packed.matrix import FLOATS, Codes, PackedMatrix, unpacked
from colossax.models.packed.settings import one_of

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of AWQ: which of eight outputs each place of a word has."""


@dataclasses.dataclass(frozen=True)
class GPTQ:
    """What `quantization_config` says.

    Attributes:
        bits: Of a code, 4 or 8.
        group: Inputs that share a scale; -1: all.
        less_one: Whether zeros are stored less 1, as the first form of the files has them.
        ordered: Whether it must be said which inputs a group has.
    """

    bits: int
    group: int
    less_one: bool
    ordered: bool

    parts = ("qweight", "qzeros", "scales", "g_idx")
    needed = "qweight"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "GPTQ":
        """Of the settings.

        Raises:
            InputError: They ask for what is not read.
        """
        one_of(said, "pack_dtype", ("int32",))
        one_of(said, "dynamic", (None, {}))
        form = one_of(said, "checkpoint_format", ("gptq", "gptq_v2"))
        return cls(
            bits=one_of(said, "bits", (4, 8), needed=True),
            group=one_of(said, "group_size", int),
            less_one=form == "gptq",
            ordered=one_of(said, "desc_act", (False, True)),
        )

    def matrix(self, *where: Any) -> PackedMatrix:
        """One of the folder."""
        return _GPTQMatrix(self, *where)


class _GPTQMatrix(PackedMatrix):
    order_name = "g_idx"

    def __init__(self, how: GPTQ, *where: Any):
        self._how, self.bits = how, how.bits
        super().__init__(*where)

    def check(self) -> None:
        (out, inputs), bits = self.shape, self._how.bits
        words = self.whole_groups(32 // bits, inputs, "words of inputs")
        self.groups = self.whole_groups(self._how.group, inputs, "groups")
        zeros = self.whole_groups(32 // bits, out, "words of outputs")
        self.expect("qweight", ("I32",), (words, out))
        self.expect("qzeros", ("I32",), (self.groups, zeros))
        self.expect("scales", FLOATS, (self.groups, out))
        if self._how.ordered or self.has("g_idx"):
            self.expect("g_idx", ("I32",), (inputs,))

    def codes(self) -> Codes:
        (out, inputs), bits = self.shape, self.bits
        codes = unpacked(self.read("qweight"), bits, 0, inputs)
        words = self.read("qzeros").view(np.uint32)
        if self._how.less_one:
            # One for each code, added to words as it was taken from words: a zero of 0 borrows.
            words = words + np.uint32(sum(1 << at for at in range(0, 32, bits)))
        zeros, of = unpacked(words, bits, 1, out), self.groups_of_inputs()
        return Codes(codes.T, self.read("scales").T, zeros.T, of)


@dataclasses.dataclass(frozen=True)
class AWQ:
    """What `quantization_config` says.

    Attributes:
        group: Inputs that share a scale; -1: all.
    """

    group: int

    parts = ("qweight", "qzeros", "scales")
    needed = "qweight"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "AWQ":
        """Of the settings.

        Raises:
            InputError: They ask for what is not read.
        """
        one_of(said, "bits", (4,), needed=True)
        one_of(said, "version", ("gemm", "GEMM"))
        one_of(said, "zero_point", (True,))
        return cls(group=one_of(said, "group_size", int))

    def matrix(self, *where: Any) -> PackedMatrix:
        """One of the folder."""
        return _AWQMatrix(self, *where)


class _AWQMatrix(PackedMatrix):
    bits = 4

    def __init__(self, how: AWQ, *where: Any):
        self._how = how
        super().__init__(*where)

    def check(self) -> None:
        out, inputs = self.shape
        words = self.whole_groups(8, out, "words of outputs")
        self.groups = self.whole_groups(self._how.group, inputs, "groups")
        self.expect("qweight", ("I32",), (inputs, words))
        self.expect("qzeros", ("I32",), (self.groups, words))
        self.expect("scales", FLOATS, (self.groups, out))

    def codes(self) -> Codes:
        out, _ = self.shape
        codes, zeros = (_in_order(self.read(name), out) for name in ("qweight", "qzeros"))
        return Codes(codes.T, self.read("scales").T, zeros.T, self.groups_of_inputs())


def _in_order(words: np.ndarray, out: int) -> np.ndarray:
    """Codes `[..., out]` of AWQ's words, outputs in their own order."""
    stored = unpacked(words, 4, 1, out).reshape(len(words), -1, 8)
    codes = np.empty_like(stored)
    codes[..., _ORDER] = stored
    return codes.reshape(len(words), out)
