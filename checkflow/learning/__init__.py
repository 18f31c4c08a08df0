"""A schedule from the training itself: recorded while it runs, planned in another process, kept for the next start."""
