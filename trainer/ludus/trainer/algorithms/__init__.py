"""The mathematics of training: pure functions of tensors that can be checked against papers.

    rewards --advantages--> advantage of each token --+
    logits --token_logprobs--> log-probs -------------+--losses--> scalar

Names from papers and projects, with the settings of the section `algorithm` that select them
(`kind` is "grpo" unless stated otherwise; losses, corrections and divergences combine freely
unless the configuration refuses a combination):

    GRPO          scale = "group", aggregation = "sequence_mean", kl_coef > 0
    Dr. GRPO      aggregation = "constant"
    RLOO          baseline = "leave_one_out"
    DAPO          scale = "group", loss.clip_high = 0.28, zero_variance_groups = "replace"
    GSPO          loss.kind = "gspo", aggregation = "sequence_mean"
    CISPO         loss.kind = "cispo"
    REINFORCE++   kind = "reinforce", kl_placement = "reward"; add baseline = "mean" for its
                  -baseline form
    PPO           kind = "ppo"
    decoupled     old_logprobs = "recompute" with a correction; old_logprobs = "rollout" with
                  correction.kind = "off" is the two-policy form

Presets (`ludus.proto.config.presets`) contain the settings of whole projects.
"""
