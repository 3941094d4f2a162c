"""One run: what it has learned, whether it still learns, and where its time goes."""

from __future__ import annotations

from grafana import variables
from grafana.model import Annotation, Dashboard, Override, Panel, Query, Row
from grafana.queries import (
    OF_ENVIRONMENT,
    OF_RUN,
    PLAYED,
    RUN,
    WINDOW,
    evaluated,
    gauge,
    increase,
    per_step,
    rate,
    share,
    wilson,
)
from ludus.proto.metrics import EvalMetric, TrainMetric, TrainSeries

NATS = "suffix: nats"
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


def _outcomes() -> Panel:
    finished = TrainMetric.NUM_EPISODES_FINISHED
    queries = []
    for word, metric, _ in _OUTCOMES:
        against = f"{word} against {{{{opponent}}}}"
        queries += [
            Query(share(metric, finished, PLAYED), against),
            Query(wilson(metric, finished, "-"), f"{against} low"),
            Query(wilson(metric, finished, "+"), f"{against} high"),
        ]
    colors = [
        Override(f"^{word} ", {"color": {"mode": "fixed", "fixedColor": color}})
        for word, _, color in _OUTCOMES
    ]
    return Panel(
        "Outcomes in training: $environment",
        "Won, drawn and lost episodes, as shares of those that finished within the window; dashed: "
        "the 95 % Wilson interval. These are sampled games at the training temperature: the "
        "evaluation beside it is the one to report.",
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
            "training never sees; dashed: the 95 % interval of the trained policy.",
            (
                Query(evaluated(EvalMetric.WIN_RATE), "{{environment}}: {{policy}}"),
                Query(evaluated(EvalMetric.WIN_RATE_CI95_LOW, "trained"), "{{environment}} low"),
                Query(evaluated(EvalMetric.WIN_RATE_CI95_HIGH, "trained"), "{{environment}} high"),
            ),
            "percentunit",
            min=0,
            max=1,
            overrides=(_LIMITS,),
        ),
        Panel(
            "Evaluated return",
            "Mean return of an evaluation's game by policy; dashed: the 95 % interval of the "
            "trained policy.",
            (
                Query(evaluated(EvalMetric.RETURN_MEAN), "{{environment}}: {{policy}}"),
                Query(evaluated(EvalMetric.RETURN_CI95_LOW, "trained"), "{{environment}} low"),
                Query(evaluated(EvalMetric.RETURN_CI95_HIGH, "trained"), "{{environment}} high"),
            ),
            "none",
            overrides=(_LIMITS,),
        ),
        Panel(
            "Gap closed",
            "How far the trained policy has come from the random policy (0 %) to the optimal one "
            "(100 %) in the newest evaluation.",
            (
                Query(
                    evaluated(EvalMetric.GAP_CLOSED, "trained"),
                    "{{environment}}",
                    empty_unless="the environment names a random and an optimal policy",
                ),
            ),
            "percentunit",
            max=1,
        ),
        Panel(
            "Reward",
            "Mean reward of the newest step's episodes, all terms weighted; dashed: one standard "
            "deviation of single episodes to both sides.",
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
            "Mean of each term of the reward, before its weight: a sum that rises through the "
            "wrong term shows here.",
            (
                Query(
                    f"max by ({PLAYED}, term) ({TrainSeries.REWARD_TERM}{{{OF_ENVIRONMENT}}})",
                    "{{environment}}: {{term}}",
                ),
            ),
            "none",
        ),
        Panel(
            "Length of an episode",
            "Mean number of turns: a policy that ends games sooner or stalls them shows here "
            "before its reward does.",
            (Query(gauge(TrainMetric.NUM_TURNS_MEAN, PLAYED), "{{environment}}"),),
            "suffix: turns",
            min=0,
        ),
        Panel(
            "Tools",
            "Shares: of the episodes those that called a tool, and of the calls those that failed, "
            "because the tool returned an error or nobody could read what was asked for.",
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
            "Calls of tools in an episode, the failed ones included.",
            (
                Query(
                    share(TrainMetric.NUM_TOOL_CALLS, TrainMetric.NUM_EPISODES, PLAYED),
                    "{{environment}}",
                ),
            ),
            "suffix: calls",
            min=0,
        ),
        _outcomes(),
    ),
)

_HEALTH = Row(
    "Does it still learn",
    (
        Panel(
            "Entropy",
            "Mean entropy of the policy at the tokens that it sampled. A fall to 0 within a few "
            "steps means that it has stopped to explore.",
            (Query(gauge(TrainMetric.ENTROPY), "{{run}}"),),
            NATS,
            min=0,
        ),
        Panel(
            "KL divergence",
            "From the reference model, and of the sampler from the learner (mismatch). The "
            "mismatch comes from numerics and from staleness: it should stay far below 0.1.",
            (
                Query(gauge(TrainMetric.REFERENCE_KL), "reference"),
                Query(gauge(TrainMetric.MISMATCH_KL), "mismatch"),
            ),
            NATS,
        ),
        Panel(
            "Groups that teach nothing",
            "Zero variance: all rewards of the group were equal. Void: fewer than two episodes "
            "were scored. Stale: too old when their turn came. Shares of the groups played.",
            tuple(
                Query(share(metric, TrainMetric.NUM_GROUPS, PLAYED), f"{{{{environment}}}}: {word}")
                for word, metric in (
                    ("zero variance", TrainMetric.NUM_ZERO_VARIANCE_GROUPS),
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
            "Environments that the curriculum has opened so far.",
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
            "Age of the groups of the newest batch, in versions of the weights: mean and oldest.",
            (
                Query(gauge(TrainMetric.STALENESS_MEAN, PLAYED), "{{environment}}: mean"),
                Query(gauge(TrainMetric.STALENESS_MAX, PLAYED), "{{environment}}: oldest"),
            ),
            "suffix: versions",
            min=0,
        ),
        Panel(
            "Loss",
            "Value of the objective that was minimised, and of the value head's loss. The "
            "objective is no measure of progress: its scale changes with the advantages.",
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
            "Shares of sampled tokens at which the clip of the importance ratio held, and of "
            "tokens and samples that the correction for off-policy data took out of the loss.",
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
            "Of the newest step, as the schedule has it.",
            (Query(gauge(TrainMetric.LEARNING_RATE), "{{run}}"),),
            "sci",
            min=0,
        ),
        Panel(
            "Explained variance",
            "Share of the returns' variance that the value head explains; at 0 it is worth "
            "nothing.",
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
            "What the run is doing.",
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
            "Where a step's time goes",
            "Seconds per step: waiting for a batch, training, publishing the weights. Where it "
            "waits, sampling is the bottleneck, and more rollout workers or servers help.",
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
            "Steps done",
            "Optimizer batches, and those of the whole run. It falls where a lost learner went "
            "back to its checkpoint.",
            (
                Query(gauge(TrainSeries.STEP), "done"),
                Query(gauge(TrainSeries.TARGET_STEPS), "planned"),
            ),
            "none",
            min=0,
            decimals=0,
        ),
        Panel(
            "Work that a loss would cost",
            "Time since the newest checkpoint, or since the run began or was resumed: what is "
            "trained again if the learner is lost now.",
            (Query(f"time() - {gauge(TrainSeries.LAST_CHECKPOINT)}", "{{run}}"),),
            "s",
            min=0,
        ),
        Panel(
            "Episodes",
            "Episodes played per second, and of these the ones that infrastructure voided, that "
            "ended with text that was no action, and that a limit cut off.",
            tuple(
                Query(rate(metric, PLAYED, WINDOW), f"{{{{environment}}}}: {word}")
                for word, metric in (
                    ("played", TrainMetric.NUM_EPISODES),
                    ("voided", TrainMetric.NUM_EPISODES_LOST),
                    ("no action", TrainMetric.NUM_EPISODES_INVALID),
                    ("cut off", TrainMetric.NUM_EPISODES_TRUNCATED),
                )
            ),
            "suffix: episodes/s",
            min=0,
        ),
        Panel(
            "Voided episodes",
            "Shares of the episodes that infrastructure voided (lost), and that ended in an "
            "exception (failed). Both are never trained on. Above 2 %: of the lost ones look at "
            "the fleet, of the failed ones at the driver's log, which has the reasons.",
            tuple(
                Query(
                    share(metric, TrainMetric.NUM_EPISODES, PLAYED), f"{{{{environment}}}}: {word}"
                )
                for word, metric in (
                    ("lost", TrainMetric.NUM_EPISODES_LOST),
                    ("failed", TrainMetric.NUM_EPISODES_FAILED),
                )
            ),
            "percentunit",
            min=0,
        ),
        Panel(
            "Restarts",
            "Restarts of the learner's ranks and of environment servers that the run owns, and "
            "groups that were rolled back with a learner, all since the run began.",
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
    "Environment opened",
    f"{increase(TrainMetric.NUM_UNLOCKS, PLAYED, window='1m')} > 0",
    "{{run}}: {{environment}}",
    "green",
    empty_unless="the curriculum opened an environment within the last minute",
)

TRAINING = Dashboard(
    uid="ludus-training",
    title="Ludus / Training",
    description="One run: what it has learned, whether it still learns, where its time goes.",
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
