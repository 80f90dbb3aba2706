"""Matrices that Hugging Face folders store in codes, read as the floats that these stand for."""

from .formats import Format as Format
from .formats import format_of as format_of
from .formats import packed_among as packed_among
from .matrix import Packed as Packed
