"""The server's half: the environment, the programs it runs, and how it is served."""
