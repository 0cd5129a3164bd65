"""The page about runs: what their folders say, in curves, a timeline, words and samples, in one HTML file."""
