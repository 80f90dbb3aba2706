"""Images and texts that are embedded side by side: their loss, their data, and runs on them."""
