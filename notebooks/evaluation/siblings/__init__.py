"""The sibling papers' evaluations: CheckFreq (FAST '21), LowDiff and GoCkpt, by their own models, beside ours."""
