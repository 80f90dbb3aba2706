"""Qwen2-VL."""

from .config import Qwen2VLConfig as Qwen2VLConfig
