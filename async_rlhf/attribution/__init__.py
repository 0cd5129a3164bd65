"""What moved a policy in one update: first-order contributions, and the update without parts of its batch."""
