"""Gemma 3, its text models."""

from .config import Gemma3Config as Gemma3Config
