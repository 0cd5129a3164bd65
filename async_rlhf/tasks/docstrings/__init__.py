"""The docstring task: its data and its gold reward."""
