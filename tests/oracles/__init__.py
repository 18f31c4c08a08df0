"""What tests compare with, and nothing else uses: slow and plain, where what it checks is fast."""
