"""CLIP."""

from .config import CLIPConfig as CLIPConfig
