"""The server's half: the console, the environment, and how it is served."""
