"""What is trained: loss, batches, optimizer."""

from .next_token import next_token_loss as next_token_loss
