"""Qwen 2 and 2.5: Llama's parts with biases on q, k and v."""

from .config import Qwen2Config as Qwen2Config
