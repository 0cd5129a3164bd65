"""What a run leaves to look at: progress bars and plots."""
