"""The policy's update: model, micro-batches, optimizer step, checkpoints."""
