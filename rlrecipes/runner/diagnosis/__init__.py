"""What this machine lacks. Owns looking; starts no part of a run, imports heavy packages only in a child process."""
