"""OLMo 2."""

from .config import OLMo2Config as OLMo2Config
