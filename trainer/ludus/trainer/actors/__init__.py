"""The processes of a run as Ray actors; each actor wraps a plain object."""
