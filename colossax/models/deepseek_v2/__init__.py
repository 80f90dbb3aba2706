"""DeepSeek V2: latent attention, experts in groups beside some that all tokens take."""

from .config import DeepSeekV2Config as DeepSeekV2Config
