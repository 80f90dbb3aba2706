"""ViT."""

from .config import ViTConfig as ViTConfig
