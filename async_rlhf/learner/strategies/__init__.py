"""How weights and work are spread over ranks, one strategy a file."""
