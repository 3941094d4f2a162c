"""Dashboard of one run: results, learning health and step durations."""

from __future__ import annotations

from grafana import variables
from grafana.model import Annotation, Dashboard, Override, Panel, Query, Row
from grafana.queries import (
    OF_ENVIRONMENT,
    OF_RUN,
    PLAYED,
    RUN,
    WINDOW,
    evaluation,
    gauge,
    increase,
    per_step,
    rate,
    share,
    wilson,
)
from ludus.proto.metrics import EvalMetric, TrainMetric, TrainSeries

NATS_UNIT = "suffix: nats"
_LIMITS = Override(
    "(low|high)$",
    {
        "custom.lineStyle": {"fill": "dash", "dash": [4, 4]},
        "custom.fillOpacity": 0,
        "custom.hideFrom": {"legend": True, "tooltip": False, "viz": False},
    },
)
_OUTCOMES = (
    ("win", TrainMetric.NUM_WINS, "green"),
    ("draw", TrainMetric.NUM_DRAWS, "yellow"),
    ("loss", TrainMetric.NUM_LOSSES, "red"),
)


def _make_outcomes() -> Panel:
    num_finished = TrainMetric.NUM_EPISODES_FINISHED
    queries = []
    for kind, metric, _ in _OUTCOMES:
        legend = f"{kind} against {{{{opponent}}}}"
        queries += [
            Query(share(metric, num_finished, PLAYED), legend),
            Query(wilson(metric, num_finished, "-"), f"{legend} low"),
            Query(wilson(metric, num_finished, "+"), f"{legend} high"),
        ]
    colors = [
        Override(f"^{kind} ", {"color": {"mode": "fixed", "fixedColor": color}})
        for kind, _, color in _OUTCOMES
    ]
    return Panel(
        "Outcomes in training: $environment",
        "Shares of won, drawn and lost episodes among those that finished within the window; "
        "dashed: 95 % Wilson interval. These episodes use the training temperature. Report the "
        "evaluation instead.",
        queries,
        "percentunit",
        width=12,
        height=9,
        min=0,
        max=1,
        overrides=(*colors, _LIMITS),
        repeat="environment",
    )


_OUTCOME = Row(
    "Outcome",
    (
        Panel(
            "Evaluation against baselines",
            "Win rate of the trained policy and of the fixed policies on the same seeds, which "
            "training does not use; dashed: 95 % interval of the trained policy.",
            (
                Query(evaluation(EvalMetric.WIN_RATE), "{{environment}}: {{policy}}"),
                Query(evaluation(EvalMetric.WIN_RATE_CI95_LOW, "trained"), "{{environment}} low"),
                Query(evaluation(EvalMetric.WIN_RATE_CI95_HIGH, "trained"), "{{environment}} high"),
            ),
            "percentunit",
            min=0,
            max=1,
            overrides=(_LIMITS,),
        ),
        Panel(
            "Evaluated return",
            "Mean return of evaluated episodes by policy; dashed: 95 % interval of the trained "
            "policy.",
            (
                Query(evaluation(EvalMetric.RETURN_MEAN), "{{environment}}: {{policy}}"),
                Query(evaluation(EvalMetric.RETURN_CI95_LOW, "trained"), "{{environment}} low"),
                Query(evaluation(EvalMetric.RETURN_CI95_HIGH, "trained"), "{{environment}} high"),
            ),
            "none",
            overrides=(_LIMITS,),
        ),
        Panel(
            "Gap closed",
            "Position of the trained policy between the random policy (0 %) and the optimal policy "
            "(100 %) in the newest evaluation.",
            (
                Query(
                    evaluation(EvalMetric.GAP_CLOSED, "trained"),
                    "{{environment}}",
                    empty_unless="the environment names a random and an optimal policy",
                ),
            ),
            "percentunit",
            max=1,
        ),
        Panel(
            "Reward",
            "Mean weighted reward of the episodes of the newest step; dashed: plus and minus one "
            "standard deviation of single episodes.",
            (
                Query(gauge(TrainMetric.REWARD_MEAN, PLAYED), "{{environment}}"),
                Query(
                    f"{gauge(TrainMetric.REWARD_MEAN, PLAYED)}\n"
                    f"  - {gauge(TrainMetric.REWARD_STD, PLAYED)}",
                    "{{environment}} low",
                ),
                Query(
                    f"{gauge(TrainMetric.REWARD_MEAN, PLAYED)}\n"
                    f"  + {gauge(TrainMetric.REWARD_STD, PLAYED)}",
                    "{{environment}} high",
                ),
            ),
            "none",
            overrides=(_LIMITS,),
        ),
        Panel(
            "Reward terms",
            "Mean of each reward term before weighting. Check here that the intended term raises "
            "the reward.",
            (
                Query(
                    f"max by ({PLAYED}, term) ({TrainSeries.REWARD_TERM}{{{OF_ENVIRONMENT}}})",
                    "{{environment}}: {{term}}",
                ),
            ),
            "none",
        ),
        Panel(
            "Episode length",
            "Mean number of turns. A change can show a new behavior of the policy earlier than the "
            "reward does.",
            (Query(gauge(TrainMetric.NUM_TURNS_MEAN, PLAYED), "{{environment}}"),),
            "suffix: turns",
            min=0,
        ),
        Panel(
            "Tools",
            "Share of the episodes with a tool call, and share of the tool calls that failed "
            "because the tool returned an error or the call could not be parsed.",
            (
                Query(
                    share(
                        TrainMetric.NUM_EPISODES_WITH_TOOL_CALLS, TrainMetric.NUM_EPISODES, PLAYED
                    ),
                    "{{environment}}: episodes with calls",
                ),
                Query(
                    share(TrainMetric.NUM_TOOL_CALLS_FAILED, TrainMetric.NUM_TOOL_CALLS, PLAYED),
                    "{{environment}}: failed calls",
                    empty_unless="tools were called",
                ),
            ),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Tool calls",
            "Tool calls per episode, including failed calls.",
            (
                Query(
                    share(TrainMetric.NUM_TOOL_CALLS, TrainMetric.NUM_EPISODES, PLAYED),
                    "{{environment}}",
                ),
            ),
            "suffix: calls",
            min=0,
        ),
        _make_outcomes(),
    ),
)

_HEALTH = Row(
    "Learning health",
    (
        Panel(
            "Entropy",
            "Mean entropy of the policy at the sampled tokens. A fall to 0 within a few steps "
            "means that the policy no longer explores.",
            (Query(gauge(TrainMetric.ENTROPY), "{{run}}"),),
            NATS_UNIT,
            min=0,
        ),
        Panel(
            "KL divergence",
            "Divergence of the policy from the reference model, and of the sampler from the "
            "learner (mismatch). Numerics and staleness cause the mismatch; it should stay far "
            "below 0.1.",
            (
                Query(gauge(TrainMetric.REFERENCE_KL), "reference"),
                Query(gauge(TrainMetric.MISMATCH_KL), "mismatch"),
            ),
            NATS_UNIT,
        ),
        Panel(
            "Groups without learning signal",
            "Shares of the played groups. Zero variance: all rewards of the group were equal. "
            "Replaced, kept: zero-variance groups for which others were played, or which were "
            "trained on because a step may play only algorithm.max_group_batches times its groups. "
            "Void: fewer than two episodes had a reward. Stale: the group was too old for its "
            "batch.",
            tuple(
                Query(share(metric, TrainMetric.NUM_GROUPS, PLAYED), f"{{{{environment}}}}: {kind}")
                for kind, metric in (
                    ("zero variance", TrainMetric.NUM_ZERO_VARIANCE_GROUPS),
                    ("replaced", TrainMetric.NUM_GROUPS_REPLACED),
                    ("kept", TrainMetric.NUM_GROUPS_KEPT),
                    ("void", TrainMetric.NUM_GROUPS_VOID),
                    ("stale", TrainMetric.NUM_GROUPS_STALE),
                )
            ),
            "percentunit",
            min=0,
            max=1,
        ),
        Panel(
            "Curriculum",
            "Environments that the curriculum has unlocked so far.",
            (
                Query(
                    gauge(TrainMetric.NUM_ENVIRONMENTS_OPEN),
                    "{{run}}",
                    empty_unless="the run has a curriculum",
                ),
            ),
            "none",
            min=0,
            decimals=0,
        ),
        Panel(
            "Staleness",
            "Staleness of the groups of the newest batch in policy versions: mean and maximum.",
            (
                Query(gauge(TrainMetric.STALENESS_MEAN, PLAYED), "{{environment}}: mean"),
                Query(gauge(TrainMetric.STALENESS_MAX, PLAYED), "{{environment}}: maximum"),
            ),
            "suffix: versions",
            min=0,
        ),
        Panel(
            "Loss",
            "Value of the minimized objective, and loss of the value head. The objective does not "
            "measure progress, because its scale changes with the advantages.",
            (
                Query(gauge(TrainMetric.LOSS), "objective"),
                Query(
                    gauge(TrainMetric.VALUE_LOSS),
                    "value head",
                    empty_unless="the algorithm has a value head",
                ),
            ),
            "none",
        ),
        Panel(
            "Gradient",
            "Norm of the gradient before clipping.",
            (Query(gauge(TrainMetric.GRAD_NORM), "{{run}}"),),
            "none",
            min=0,
        ),
        Panel(
            "Clipped and masked",
            "Share of sampled tokens with a clipped importance ratio, and shares of tokens and "
            "samples that the off-policy correction removed from the loss.",
            (
                Query(gauge(TrainMetric.CLIP_RATIO), "clipped tokens"),
                Query(gauge(TrainMetric.MASKED_TOKEN_RATIO), "masked tokens"),
                Query(gauge(TrainMetric.MASKED_SEQUENCE_RATIO), "masked samples"),
            ),
            "percentunit",
            min=0,
        ),
        Panel(
            "Learning rate",
            "Learning rate of the newest step.",
            (Query(gauge(TrainMetric.LEARNING_RATE), "{{run}}"),),
            "sci",
            min=0,
        ),
        Panel(
            "Explained variance",
            "Share of the variance of returns that the value head explains; at 0 the value head is "
            "useless.",
            (
                Query(
                    gauge(TrainMetric.EXPLAINED_VARIANCE),
                    "{{run}}",
                    empty_unless="the algorithm has a value head",
                ),
            ),
            "percentunit",
            max=1,
        ),
    ),
)

_STEPS = Row(
    "Steps and episodes",
    (
        Panel(
            "Phase",
            "Current phase of the run.",
            (Query(f"max by (phase) ({TrainSeries.PHASE}{{{OF_RUN}}})", "{{phase}}"),),
            "none",
            kind="state-timeline",
            width=24,
            height=7,
            mappings={
                "0": {"text": " ", "color": "transparent", "index": 0},
                "1": {"text": "on", "color": "green", "index": 1},
            },
        ),
        Panel(
            "Step duration by part",
            "Seconds per step for waiting for a batch, training and publishing the weights. A long "
            "wait means that sampling is the bottleneck; add rollout workers or servers.",
            (
                Query(per_step(TrainMetric.WAIT_FOR_BATCH_S), "wait for a batch"),
                Query(per_step(TrainMetric.TRAIN_S), "train"),
                Query(per_step(TrainMetric.PUBLISH_S), "publish"),
            ),
            "s",
            min=0,
            stacked=True,
        ),
        Panel(
            "Completed steps",
            "Completed and planned training steps. The curve falls when a lost learner resumes "
            "from its checkpoint.",
            (
                Query(gauge(TrainSeries.STEP), "completed"),
                Query(gauge(TrainSeries.TARGET_STEPS), "planned"),
            ),
            "none",
            min=0,
            decimals=0,
        ),
        Panel(
            "Time since the last checkpoint",
            "Time since the latest checkpoint, or since the run started or resumed. This work is "
            "repeated if the learner is lost now.",
            (Query(f"time() - {gauge(TrainSeries.LAST_CHECKPOINT)}", "{{run}}"),),
            "s",
            min=0,
        ),
        Panel(
            "Episodes",
            "Episodes per second, and the number of them that were lost with their infrastructure, "
            "ended with text that is not an action, or were truncated by a limit.",
            tuple(
                Query(rate(metric, PLAYED, WINDOW), f"{{{{environment}}}}: {kind}")
                for kind, metric in (
                    ("played", TrainMetric.NUM_EPISODES),
                    ("lost", TrainMetric.NUM_EPISODES_LOST),
                    ("invalid", TrainMetric.NUM_EPISODES_INVALID),
                    ("truncated", TrainMetric.NUM_EPISODES_TRUNCATED),
                )
            ),
            "suffix: episodes/s",
            min=0,
        ),
        Panel(
            "Void episodes",
            "Shares of episodes that infrastructure ended (lost) or an exception ended (failed). "
            "Neither is trained on. Above 2 %, check the fleet for lost episodes, and the driver's "
            "log for the reasons of failed episodes.",
            tuple(
                Query(
                    share(metric, TrainMetric.NUM_EPISODES, PLAYED),
                    f"{{{{environment}}}}: {kind}",
                )
                for kind, metric in (
                    ("lost", TrainMetric.NUM_EPISODES_LOST),
                    ("failed", TrainMetric.NUM_EPISODES_FAILED),
                )
            ),
            "percentunit",
            min=0,
        ),
        Panel(
            "Restarts",
            "Restarts of the learner's ranks and of the run's environment servers, and groups that "
            "were rolled back with a learner, since the start of the run.",
            (
                Query(gauge(TrainMetric.NUM_LEARNER_RESTARTS), "learner"),
                Query(gauge(TrainMetric.NUM_ENVIRONMENT_RESTARTS), "environment servers"),
                Query(
                    f"sum by ({RUN}) ({gauge(TrainMetric.NUM_GROUPS_ROLLED_BACK, PLAYED)})",
                    "groups rolled back",
                ),
            ),
            "none",
            min=0,
            decimals=0,
        ),
    ),
)

_CHECKPOINTS = Annotation(
    "Checkpoint",
    f"{increase(TrainMetric.NUM_CHECKPOINTS, window='1m')} > 0",
    "{{run}}",
    "purple",
    empty_unless="a checkpoint was written within the last minute",
)
_RESTARTS = Annotation(
    "Learner restarted",
    f"{increase(TrainMetric.NUM_LEARNER_RESTARTS, window='1m')} > 0",
    "{{run}}",
    "red",
    empty_unless="the learner was lost within the last minute",
)

_UNLOCKS = Annotation(
    "Environment unlocked",
    f"{increase(TrainMetric.NUM_UNLOCKS, PLAYED, window='1m')} > 0",
    "{{run}}: {{environment}}",
    "green",
    empty_unless="the curriculum unlocked an environment within the last minute",
)

TRAINING = Dashboard(
    uid="ludus-training",
    title="Ludus / Training",
    description="Results, learning health and step durations of one run.",
    variables=(
        variables.DATASOURCE,
        variables.NAMESPACES,
        variables.ONE_RUN,
        variables.ENVIRONMENTS_OF_RUN,
        variables.WINDOW,
    ),
    rows=(_OUTCOME, _HEALTH, _STEPS),
    annotations=(_CHECKPOINTS, _RESTARTS, _UNLOCKS),
)
