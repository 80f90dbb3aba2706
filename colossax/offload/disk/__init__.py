"""State below host memory: one file of equal records, a layer each, updated in one pass."""

from .header import disk_bytes as disk_bytes
from .layout import RecordLayout as RecordLayout
from .pipeline import RING as RING
from .store import RecordStore as RecordStore
