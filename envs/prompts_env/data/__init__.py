"""Data sets: files and folders as rows, and rows as tasks."""
