"""What lies on disk, whoever reads or writes it."""
