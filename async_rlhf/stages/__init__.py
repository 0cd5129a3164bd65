"""The stages around online training, each skipped if it is done: SFT, pairs, reward model."""
