"""Qwen 3 (dense): Llama's parts with normed queries and keys."""

from .config import Qwen3Config as Qwen3Config
