"""How near an answer in words is to the right ones: plain functions of texts."""
