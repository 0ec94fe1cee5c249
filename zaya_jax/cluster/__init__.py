"""Who and where a process is: its place, the roll call, signals, others that die, programs that all compile first."""
