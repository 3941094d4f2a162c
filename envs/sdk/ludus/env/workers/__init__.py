"""Sessions in worker processes, isolated from the server and from each other."""
