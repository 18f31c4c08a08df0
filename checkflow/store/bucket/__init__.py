"""The bucket behind a store, and what runs in the process that uploads to it: `python -m checkflow.store.bucket`."""
