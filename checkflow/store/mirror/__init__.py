"""The process that holds another rank's checkpoints in memory, and writes them down where its training ends badly."""
