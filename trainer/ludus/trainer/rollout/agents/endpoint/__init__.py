"""The HTTP endpoint through which an agent samples from the policy."""
