"""What moved a policy in one update."""
