"""Llama 4, text only: chunks of positions, layers without rope, experts by sigmoid."""

from .config import Llama4Config as Llama4Config
