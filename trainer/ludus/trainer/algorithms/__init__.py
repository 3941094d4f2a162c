"""The mathematics of training: pure functions of tensors that can be checked against papers."""
