"""BART."""

from .config import BARTConfig as BARTConfig
