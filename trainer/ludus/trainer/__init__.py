"""The training plane: rollouts, learner, weights, and the loops that join them."""
