"""Evaluation on held-out prompts: rewards, win-rates with intervals, KL and perplexity."""
