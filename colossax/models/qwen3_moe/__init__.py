"""Qwen 3 with experts: Qwen 3's parts, experts in place of MLPs."""

from .config import Qwen3MoEConfig as Qwen3MoEConfig
