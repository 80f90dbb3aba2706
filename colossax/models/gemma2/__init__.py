"""Gemma 2."""

from .config import Gemma2Config as Gemma2Config
