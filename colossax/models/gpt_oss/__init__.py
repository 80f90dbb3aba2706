"""gpt-oss: attention with sinks, in every second layer within a window; experts with biases."""

from .config import GPTOSSConfig as GPTOSSConfig
