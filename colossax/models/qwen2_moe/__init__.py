"""Qwen 2 with experts: Qwen 2's parts, experts beside one that all tokens take."""

from .config import Qwen2MoEConfig as Qwen2MoEConfig
