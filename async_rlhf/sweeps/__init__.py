"""Many runs: what they are, how they are worked off, and what they show together."""
