"""Mistral: Llama's parts with a sliding window."""

from .config import MistralConfig as MistralConfig
