"""What is done with runs, and not in them: the core never imports it. Commands are found by name."""
