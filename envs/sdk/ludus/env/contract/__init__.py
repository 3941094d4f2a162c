"""The contract of environments: rules that anyone can run in process, and how they play."""
