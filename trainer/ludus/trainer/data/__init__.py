"""From groups to batches: admission, buffer, advantages, sharing of equal sequences."""
