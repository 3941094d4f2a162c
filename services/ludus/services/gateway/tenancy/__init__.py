"""Who calls a gateway, what they may do, and what they use."""
