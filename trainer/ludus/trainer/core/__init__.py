"""Types, interfaces and small tools that every package of the trainer may use."""
