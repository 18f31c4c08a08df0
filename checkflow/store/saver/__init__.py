"""What runs in the saver's process: `python -m checkflow.store.saver`."""
