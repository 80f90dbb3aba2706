"""A drafter as a task: it learns to say what a frozen model will say."""
