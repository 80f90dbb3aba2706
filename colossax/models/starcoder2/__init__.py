"""StarCoder2."""

from .config import StarCoder2Config as StarCoder2Config
