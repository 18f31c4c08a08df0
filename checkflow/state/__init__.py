"""What a resume needs of a training: its tensors, their names, what the host holds, and putting all of it back.

names.py   the one naming of tensors     live.py    the live tensors
host/      what no tensor file holds     restore/   a checkpoint's state into a training
"""
