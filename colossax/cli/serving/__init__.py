"""The engine's process of `colossax serve`, and plans for what continues texts."""
