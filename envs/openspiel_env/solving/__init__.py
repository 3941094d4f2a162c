"""Exact solutions of small games. `python -m openspiel_env.solving` writes solutions.json."""
