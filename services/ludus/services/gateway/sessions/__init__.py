"""Sessions on the servers of a fleet, addressed by signed ids."""
