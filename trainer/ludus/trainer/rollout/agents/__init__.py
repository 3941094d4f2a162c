"""Episodes that a third-party agent plays through an OpenAI-compatible endpoint."""
