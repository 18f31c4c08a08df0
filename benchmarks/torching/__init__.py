"""torch's own tests of distributed checkpoints, run with checkflow's classes in the place of torch's."""
