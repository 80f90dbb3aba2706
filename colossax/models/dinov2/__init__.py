"""DINOv2."""

from .config import DINOv2Config as DINOv2Config
