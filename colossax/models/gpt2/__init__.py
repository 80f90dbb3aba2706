"""GPT-2."""

from .config import GPT2Config as GPT2Config
