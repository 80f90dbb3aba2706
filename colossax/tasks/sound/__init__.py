"""Sound as a task: what is written of what is heard."""
