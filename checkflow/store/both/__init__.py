"""What trainer and saver have in common beside memory: locks, words to each other, how long both try again."""
