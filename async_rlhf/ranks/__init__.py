"""The ranks of a learner: what they say to each other, how they start, and who notices when one fails."""
