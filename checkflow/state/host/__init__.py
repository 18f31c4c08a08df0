"""The host half of a checkpoint: everything a resume needs that no tensor file holds, as one JSON record.

json_values.py values as JSON without pickle: the table of forms   encode.py, decode.py   to and from it
rng.py         Python's, NumPy's and torch's generators            optimizers.py          groups, steps, entries
objects.py     what the user attached: schedulers, scaler, loader  record.py              the record's wire form
modes.py       which modules are in training mode                  gradients.py           which there are
capture.py     all of it at once, at the iteration's end           earlier.py             names as they were written
"""
