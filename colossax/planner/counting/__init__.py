"""What a step needs, counted before it runs."""
