"""What each part of formulation `direct`, and slack, buys: planned with one part more at a time."""
