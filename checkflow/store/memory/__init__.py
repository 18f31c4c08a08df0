"""The memory that trainer and saver share, and each one's side of it."""
