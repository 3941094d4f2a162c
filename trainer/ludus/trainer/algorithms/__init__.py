"""The mathematics of training: pure functions of tensors that can be checked against papers.

    rewards --advantages, moments--> credit of each token --+
    logits --logits--> log-probs --ratios, losses--> loss of each token --aggregation--> scalar

`policy_loss` puts them together for one micro-batch, `value_loss` is a critic's, `preference`
a reward model's.

What papers and projects call it, and what the section `algorithm` says for it (`kind` is "grpo"
where nothing else stands; losses, corrections and divergence combine freely unless refused):

    GRPO          scale = "group", aggregation = "sequence_mean", kl_coef > 0
    Dr. GRPO      aggregation = "constant"
    RLOO          baseline = "leave_one_out"
    DAPO          scale = "group", loss.clip_high = 0.28, zero_variance_groups = "replace"
    GSPO          loss.kind = "gspo", aggregation = "sequence_mean"
    CISPO         loss.kind = "cispo"
    REINFORCE++   kind = "reinforce", kl_placement = "reward"; with baseline = "mean" its
                  -baseline form
    PPO           kind = "ppo"
    decoupled     old_logprobs = "recompute" with a correction; old_logprobs = "rollout" with
                  correction.kind = "off" is the two-policy form

Presets (`ludus.proto.config.presets`) hold the settings of whole projects.
"""
