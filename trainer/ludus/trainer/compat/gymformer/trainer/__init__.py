"""What trains: agents in environments."""
