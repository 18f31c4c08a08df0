"""What other tools would do with the same problem, one file each."""
