"""What runs in the trainer's process: its handle on the store, and what keeps a saver running."""
