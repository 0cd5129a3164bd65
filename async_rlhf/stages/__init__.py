"""The supervised stages around online training, each skipped where it is done: SFT, pairs, reward model."""
