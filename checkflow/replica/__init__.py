"""The replica: all of the training's state in host memory, brought on by the same updates in a process of its own."""
