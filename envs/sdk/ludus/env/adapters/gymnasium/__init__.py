"""Gymnasium's environments as ours: spaces as types, numbers and pictures as text."""
