"""DeepSeek V3: DeepSeek V2's parts, experts scored one by one and kept even by a bias."""

from .config import DeepSeekV3Config as DeepSeekV3Config
