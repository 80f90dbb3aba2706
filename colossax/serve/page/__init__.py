"""What a person sees: a page with a chat, and with how the engine is."""
