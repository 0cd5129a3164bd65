"""Output for people: logs, traces, progress bars and plots."""
