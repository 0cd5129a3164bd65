"""What a process does with its machine: files, locks, signals, ports, child processes, random generators, logs."""
