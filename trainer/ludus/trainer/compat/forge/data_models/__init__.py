"""What Forge's parts hand to each other."""
