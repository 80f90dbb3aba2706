"""BLOOM."""

from .config import BloomConfig as BloomConfig
from .model import Bloom as Bloom
