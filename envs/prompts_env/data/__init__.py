"""Data sets: files and folders as rows, rows as tasks, and what is written for them."""
