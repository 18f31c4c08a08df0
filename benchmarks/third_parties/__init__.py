"""Trainings of other people's packages: small, from their configuration classes, with no weights to download.

case.py     what a training here is             packages/   one file a package or a kind of them, found by its name
digests.py  every byte that a resume must bring back       judge.py    compiles, trains, kills and resumes one
results.py  what came of it, as a table and as JSON        forked.py   a life in a forked process with limits
"""
