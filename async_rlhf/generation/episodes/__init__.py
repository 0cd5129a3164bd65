"""Episodes: the policy acts, an environment, a tool or an agent answers, and the policy goes on."""
