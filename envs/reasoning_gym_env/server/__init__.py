"""Server side: the environment and its server program."""
