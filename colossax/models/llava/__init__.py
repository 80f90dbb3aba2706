"""LLaVA 1.5."""

from .config import LlavaConfig as LlavaConfig
