"""Text parsing and field rendering, shared by the renderers of environments."""
