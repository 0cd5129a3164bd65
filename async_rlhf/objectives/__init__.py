"""Pure functions on tensors: log-probabilities, KL estimators, losses. They know no model and no schedule."""
