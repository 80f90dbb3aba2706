"""BLOOM."""

from .config import BloomConfig as BloomConfig
