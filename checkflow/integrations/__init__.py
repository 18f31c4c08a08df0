"""checkflow in other people's training loops, a file for each library; none is imported unless it is asked for."""
