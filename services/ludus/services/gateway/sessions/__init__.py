"""Sessions on the servers of a fleet, by signed id."""
