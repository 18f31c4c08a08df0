"""Joins runtime and store: a training that saves itself while it runs.

attach.py       checks, and opens everything          checkpointer.py   what the user holds
files.py        which files the state goes to         sink.py           the store, as the runtime sees it
"""
