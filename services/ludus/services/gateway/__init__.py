"""The gateway: routes, places and admits the sessions of environment servers."""
