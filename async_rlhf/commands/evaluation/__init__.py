"""Evaluation on held-out prompts: gold scores, win-rates with intervals, KL and perplexity."""
