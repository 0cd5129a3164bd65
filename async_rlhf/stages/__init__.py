"""The supervised stages around online training: SFT, preference pairs, reward model. Each is skipped where it is done."""
