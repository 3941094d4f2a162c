"""The loops of the driver; they run, and are tested, without Ray."""
