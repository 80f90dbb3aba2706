"""Llama 2, 3, 3.1 and 3.2."""

from .config import LlamaConfig as LlamaConfig
