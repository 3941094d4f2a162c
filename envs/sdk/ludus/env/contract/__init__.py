"""The contract of environments: rules that run in process, and how they play episodes."""
