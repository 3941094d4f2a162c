"""The servers behind a gateway: where they are, how full, and which gets a session."""
