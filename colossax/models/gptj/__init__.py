"""GPT-J."""

from .config import GPTJConfig as GPTJConfig
