"""Phi-3, Phi-3.5 and Phi-4."""

from .config import Phi3Config as Phi3Config
