"""Matrices as compressed-tensors stores them: in words of 32 bits, or a byte for each number."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from colossax.errors import InputError, WeightsError
from colossax.models.packed.matrix import FLOATS, Codes, PackedMatrix, unpacked
from colossax.models.packed.settings import CONFIG, mapping, one_of

_FORMATS = {
    "pack-quantized": ("int", (4, 8), ("group", "channel", "tensor")),
    "int-quantized": ("int", (8,), ("channel", "tensor")),
    "float-quantized": ("float", (8,), ("channel", "tensor")),
}
"""Type of the codes, their bits, and which numbers share a scale."""

_APART = ("group", "dynamic")
"""Orders in which groups have inputs that are no neighbours."""

_ORDERS = (None, "weight", "static", *_APART)

_OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
"""How inputs would be quantised, which they are not here."""


@dataclasses.dataclass(frozen=True)
class Compressed:
    """What `quantization_config` says.

    Attributes:
        form: One of `_FORMATS`.
        bits: Of a code.
        group: Inputs that share a scale; -1: all.
        each: Whether each output has scales of its own.
        zeros: Whether there must be zeros.
        ordered: Whether it must be said which inputs a group has.
    """

    form: str
    bits: int
    group: int
    each: bool
    zeros: bool
    ordered: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """Ends of the names of tensors that hold a matrix."""
        own = ("weight_packed", "weight_shape") if self.packed else ("weight",)
        return (*own, "weight_scale", "weight_zero_point", "weight_g_idx", *_OF_INPUTS)

    @property
    def needed(self) -> str:
        """The one that tells that there is a matrix in codes."""
        return "weight_packed" if self.packed else "weight_scale"

    @property
    def packed(self) -> bool:
        """Whether several codes share a word."""
        return self.form == "pack-quantized"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Compressed":
        """Of the settings.

        Raises:
            InputError: They ask for what is not read.
        """
        form = one_of(said, "format", tuple(_FORMATS), needed=True)
        for name in ("sparsity_config", "transform_config"):
            asked = said.get(name) or {}
            if asked and mapping(asked).get("format") != "dense":
                raise InputError(
                    f"config.json: {CONFIG} with {name} = {asked!r} is not supported; give the"
                    " model without it"
                )
        groups = mapping(said.get("config_groups")).values()
        found = {_scheme(mapping(mapping(group).get("weights")), form) for group in groups}
        if len(found) != 1:
            raise InputError(
                f"config.json: {CONFIG} has {len(found)} kinds of config_groups; only folders whose"
                " matrices are all quantised alike are read: give the model in floats"
            )
        return found.pop()

    def matrix(self, *where: Any) -> PackedMatrix:
        """One of the folder."""
        return _CompressedMatrix(self, *where)


def _scheme(said: Mapping[str, Any], form: str) -> Compressed:
    kind, bits, strategies = _FORMATS[form]
    one_of(said, "type", (kind,))
    strategy = one_of(said, "strategy", strategies, needed=True)
    return Compressed(
        form=form,
        bits=one_of(said, "num_bits", bits, needed=True),
        group=one_of(said, "group_size", int) if strategy == "group" else -1,
        each=strategy != "tensor",
        zeros=not one_of(said, "symmetric", (True, False)),
        ordered=one_of(said, "actorder", _ORDERS) in _APART,
    )


class _CompressedMatrix(PackedMatrix):
    scales_name, order_name = "weight_scale", "weight_g_idx"

    def __init__(self, how: Compressed, *where: Any):
        self._how, self.bits = how, how.bits
        self.floats = how.form == "float-quantized"
        super().__init__(*where)

    def check(self) -> None:
        (out, inputs), how = self.shape, self._how
        self.groups = self.whole_groups(how.group, inputs, "groups")
        if how.packed:
            self.expect("weight_packed", ("I32",), (out, -(-inputs * how.bits // 32)))
        else:
            kind = "I8" if how.form == "int-quantized" else "F8_E4M3"
            self.expect("weight", (kind,), (out, inputs))
        scales = ((out, self.groups),) if how.each else ((1,), (1, 1), ())
        self.expect("weight_scale", FLOATS, *scales)
        self.with_zeros = self.has("weight_zero_point")
        if how.zeros or self.with_zeros:
            self._check_zeros(scales)
        if how.ordered or self.has("weight_g_idx"):
            self.expect("weight_g_idx", ("I32",), (inputs,))

    def _check_zeros(self, scales: tuple[tuple[int, ...], ...]) -> None:
        words = (-(-self.shape[0] * self._how.bits // 32), self.groups)
        if self._how.packed and self._how.each:
            self.expect("weight_zero_point", ("I32",), words)
        else:
            self.expect("weight_zero_point", ("I8",), *scales)

    def codes(self) -> Codes:
        zeros = 0 if self.floats else 2 ** (self.bits - 1)
        return Codes(
            self._words("weight_packed", 1) if self._how.packed else self._in_bytes("weight"),
            self._spread(self.read("weight_scale")),
            self._spread(self._zeros()) if self.with_zeros else zeros,
            self.groups_of_inputs(),
        )

    def _zeros(self) -> np.ndarray:
        if self._how.packed and self._how.each:
            return self._words("weight_zero_point", 0)
        return self._in_bytes("weight_zero_point")

    def _spread(self, found: np.ndarray) -> np.ndarray:
        """Numbers of each output and group."""
        return np.broadcast_to(
            found.reshape(found.shape if self._how.each else (1, 1)), (self.shape[0], self.groups)
        )

    def _words(self, part: str, axis: int) -> np.ndarray:
        """Codes, which words hold from the least one on, as they are here."""
        return unpacked(self.read(part), self.bits, axis, self.shape[axis])

    def _in_bytes(self, part: str) -> np.ndarray:
        """What has a byte each; whole numbers have a sign there, and here begin at 0."""
        found = self.read(part)
        if self.floats:
            return found
        codes = found.astype(np.int16) + 2 ** (self.bits - 1)
        if codes.min(initial=0) < 0 or codes.max(initial=0) >= 2**self.bits:
            raise WeightsError(
                f"{self._files[part]}: has numbers from {found.min()} to {found.max()}, more than"
                f" {self.bits} bits tell apart; copy the weights again"
            )
        return codes.astype(np.uint8)
