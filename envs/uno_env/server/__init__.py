"""The server's half: the environment, and how it is served."""
