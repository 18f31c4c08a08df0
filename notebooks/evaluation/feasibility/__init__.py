"""What can be checkpointed how often, where, and at what cost: pictures and tables of sweeps."""
