"""Who trains: the learner, what watches its ratios, and the strategies that spread its weights."""
