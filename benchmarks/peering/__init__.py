"""The parts of peers.py: what is trained, the processes that train it, and one file for each kind of figure."""
