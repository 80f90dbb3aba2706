"""Checkpoints: sharded arrays and JSON documents on disk, independent of mesh and processes."""

from .checkpointer import Checkpointer as Checkpointer
from .records import RecordReader as RecordReader
from .records import RecordWriter as RecordWriter
from .slots import ArraySlot as ArraySlot
from .slots import RowSource as RowSource
from .slots import slot_of as slot_of
