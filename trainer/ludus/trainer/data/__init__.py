"""Groups between rollout and training: tasks, admission, buffer, batches, counts."""
