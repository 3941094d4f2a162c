"""Adapter for the environments of Gymnasium, with a text renderer for language models."""
