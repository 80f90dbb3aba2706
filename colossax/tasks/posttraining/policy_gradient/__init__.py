"""Policy gradients: answers that the model gives in training, and what is learned from them."""
