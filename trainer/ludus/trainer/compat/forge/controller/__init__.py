"""Parts that are called as Forge's actors and services are."""
