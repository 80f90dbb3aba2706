"""The processes of a run: how they meet, and what they agree on."""
