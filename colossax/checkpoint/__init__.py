"""Checkpoints: sharded arrays and JSON documents on disk, independent of mesh and processes."""

from .checkpointer import Checkpointer as Checkpointer
from .records import RecordReader as RecordReader
from .records import RecordWriter as RecordWriter
from .records import find_checkpoint as find_checkpoint
from .slots import ArraySlot as ArraySlot
from .slots import LayerSource as LayerSource
from .slots import slot_of as slot_of
