"""`ludus eval`: evaluates the policy of a run, or any models without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ludus.proto.errors import ConfigError
from ludus.proto.paths import expand_home, parse_path
from ludus.proto.runs import CONFIG_FILE, EVAL_FILE, Evaluation
from ludus.services.cli.checkpoint_names import find_checkpoint, is_checkpoint_name
from ludus.services.cli.console import get_stdout, print_line
from ludus.services.cli.options import TARGET_HELP, Options
from ludus.services.cli.tables import make_eval_tables
from ludus.services.cli.train_command import exit_on_failure, read_run_config, run_quietly

if TYPE_CHECKING:
    from ludus.services.cli.eval_models import ModelOptions

DEFAULT_NUM_EPISODES = 200

_MODEL_PANEL = "Models without a run"

RunFolder = Annotated[
    Path | None,
    typer.Argument(
        metavar="[RUN_DIR]",
        show_default=False,
        help="Folder of a run, for example runs/demo.",
        callback=expand_home,
    ),
]
NumEpisodes = Annotated[
    int | None,
    typer.Option(
        "--episodes",
        "--games",
        help="Number of episodes of each policy.",
        show_default=f"eval.num_games; {DEFAULT_NUM_EPISODES} for models",
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 selects the most likely token or action. A network allows "
        "only 0 and 1.",
        show_default="eval.temperature; 1 for models",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="STEP|latest|best|FOLDER",
        help="Checkpoint of the run: its step, the latest, that with the best evaluation, or a "
        "folder.",
        show_default="the latest of the run",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="ID|FOLDER",
        help="Model to evaluate: a folder, a Hugging Face id, or a name at --endpoint. Repeatable.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
EnvTarget = Annotated[
    str | None,
    typer.Option(
        "--env",
        metavar="TARGET|ADDRESS",
        help=f"Environment: {TARGET_HELP}; or the address of a running server.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
Generator = Annotated[
    str | None,
    typer.Option(
        metavar="transformers|vllm",
        help="Engine that samples the completions.",
        show_default="transformers",
        rich_help_panel=_MODEL_PANEL,
    ),
]
SeedOption = Annotated[
    int,
    typer.Option(help="Number that selects the episodes.", rich_help_panel=_MODEL_PANEL),
]
MaxCompletionTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum number of tokens of a completion.",
        show_default="256, or half of a shorter context",
        rich_help_panel=_MODEL_PANEL,
    ),
]
ToolsFlag = Annotated[
    bool,
    typer.Option(
        "--tools",
        help="Let completions call the environment's tools.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
Baselines = Annotated[
    list[str] | None,
    typer.Option(
        "--baseline",
        metavar="NAME",
        help="Fixed policy to compare with. Repeatable.",
        show_default="all of the environment",
        rich_help_panel=_MODEL_PANEL,
    ),
]
EndpointOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="OpenAI-compatible endpoint that serves the models.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
EndpointToken = Annotated[
    str,
    typer.Option(
        "--token-env",
        metavar="NAME",
        help="Environment variable with the token of the endpoint, if it needs one.",
        rich_help_panel=_MODEL_PANEL,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="File for the result and every completion, as JSON.",
        rich_help_panel=_MODEL_PANEL,
        callback=expand_home,
    ),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="File for an HTML report.",
        rich_help_panel=_MODEL_PANEL,
        callback=expand_home,
    ),
]
RunSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help="Override a configuration field, for example rollout.top_p=0.9. Repeatable.",
        rich_help_panel=_MODEL_PANEL,
    ),
]


def evaluate(
    run_dir: RunFolder = None,
    num_episodes: NumEpisodes = None,
    temperature: TemperatureOption = None,
    checkpoint: Checkpoint = None,
    models: Models = None,
    target: EnvTarget = None,
    options: Options = None,
    generator: Generator = None,
    seed: SeedOption = 0,
    max_completion_tokens: MaxCompletionTokens = None,
    uses_tools: ToolsFlag = False,
    baselines: Baselines = None,
    endpoint: EndpointOption = None,
    token_env: EndpointToken = "OPENAI_API_KEY",
    json_path: JsonFile = None,
    report_path: ReportFile = None,
    overrides: RunSettings = None,
) -> None:
    """Compare a policy with fixed policies on the same seeds.

    With RUN_DIR, evaluates the trained policy of a run and writes RUN_DIR/eval.json. With --model
    and --env, evaluates models without a run.

    Example: `ludus eval runs/demo --episodes 20000 --temperature 0`

    Example: `ludus eval --model Qwen/Qwen3-0.6B --env openspiel_env --option game=blackjack`
    """
    from ludus.services.cli.eval_models import ModelOptions, evaluate_models

    _check_episodes(num_episodes, temperature)
    model_options = ModelOptions(
        models=tuple(models or ()),
        target=target,
        options=tuple(options or ()),
        num_episodes=num_episodes or DEFAULT_NUM_EPISODES,
        temperature=1.0 if temperature is None else temperature,
        generator=generator,
        seed=seed,
        max_completion_tokens=max_completion_tokens,
        uses_tools=uses_tools,
        baselines=tuple(baselines or ()),
        endpoint=endpoint,
        token_env=token_env,
        json_path=json_path,
        report_path=report_path,
        overrides=tuple(overrides or ()),
    )
    if run_dir is not None:
        _refuse_model_options(run_dir, model_options)
        _evaluate_run(run_dir, num_episodes, temperature, checkpoint)
        return
    if checkpoint is not None:
        raise ConfigError("--checkpoint belongs to a run; name its RUN_DIR, or omit --checkpoint")
    evaluate_models(model_options)


def _check_episodes(num_episodes: int | None, temperature: float | None) -> None:
    if num_episodes is not None and num_episodes < 1:
        raise ConfigError(f"--episodes must be 1 or more, got {num_episodes}")
    if temperature is not None and not temperature >= 0:  # also for NaN
        raise ConfigError(f"--temperature must be 0 or more, got {temperature:g}")


def _refuse_model_options(run_dir: Path, options: ModelOptions) -> None:
    """Refuse options for models, because a run has its own model and environments."""
    given_options = {
        "--model": options.models,
        "--env": options.target,
        "--option": options.options,
        "--generator": options.generator,
        "--seed": options.seed,
        "--max-completion-tokens": options.max_completion_tokens,
        "--tools": options.uses_tools,
        "--baseline": options.baselines,
        "--endpoint": options.endpoint,
        "--json": options.json_path,
        "--report": options.report_path,
        "--set": options.overrides,
    }
    for name, value in given_options.items():
        if value:
            raise ConfigError(
                f"{name} cannot be combined with the run '{run_dir}', which has a model and "
                f"environments; remove {name}, or evaluate a model with --model and --env"
            )


def _evaluate_run(
    run_dir: Path, num_games: int | None, temperature: float | None, checkpoint: str | None
) -> None:
    if _is_model(run_dir):
        raise ConfigError(
            f"'{run_dir}' is a model, not a run; evaluate it with: ludus eval --model {run_dir} "
            "--env TARGET"
        )
    read_run_config(run_dir)
    eval_path = run_dir / EVAL_FILE
    arguments = ["eval", "--config", str(run_dir / CONFIG_FILE), "--run-dir", str(run_dir)]
    options: dict[str, object] = {"--games": num_games, "--temperature": temperature}
    if checkpoint is not None:
        is_name = is_checkpoint_name(checkpoint)
        options["--checkpoint"] = (
            find_checkpoint(run_dir, checkpoint) if is_name else parse_path(checkpoint)
        )
    for option, setting in options.items():
        if setting is not None:
            arguments += [option, str(setting)]
    end = run_quietly("evaluating", [*arguments, "--output", str(eval_path)])
    exit_on_failure(end, run_dir, "nothing was written")
    evaluation = Evaluation.model_validate_json(eval_path.read_bytes())
    console = get_stdout()
    for table in make_eval_tables(evaluation):
        console.print(table)
    print_line(console, f"written to {eval_path}", style="dim")


def _is_model(folder: Path) -> bool:
    """Return whether the config.json of a folder is that of a Hugging Face model."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and "model_type" in config
