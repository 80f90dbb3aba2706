"""GPT-NeoX and Pythia."""

from .config import GPTNeoXConfig as GPTNeoXConfig
