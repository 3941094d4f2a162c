"""Inference engines, and the thread that drives one."""
