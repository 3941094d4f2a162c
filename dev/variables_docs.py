"""Write docs/variables.md: the environment variables that programs of Ludus read, or check it."""

from __future__ import annotations

from generated_page import make_table, write_or_check_page
from option_tables import find_option_models

from ludus.env.options import format_option_table, make_variable_name

INTRODUCTION = """# Environment variables

A secret is read from a variable or from a file, never from an argument, because every user of a \
machine can read the arguments of its processes. Options that end in `token_env` name the variable \
of a token, so the names below are defaults. A variable never changes while a process runs; \
[security.md](security.md#replacing-tokens-and-keys) lists the options for files that may be \
replaced.

This page is generated: `.venv/bin/python dev/variables_docs.py`.
"""
_HEAD = ("variable", "read by", "meaning")
_SERVERS = (
    (
        "`LUDUS_ENV_TOKEN`",
        "servers, clients, runs, `ludus env`",
        "Token of an environment server, or of a gateway when a run or a command is the client.",
    ),
    (
        "`LUDUS_GATEWAY_TOKEN`",
        "gateways",
        "Token with all scopes that all clients share, without a file of tenants or tokens.",
    ),
    (
        "`LUDUS_SESSION_KEY`",
        "gateways, servers",
        "Key that signs session ids, at least 16 bytes. Gateways and their servers share it.",
    ),
    (
        "`LUDUS_SERVER_KEY`",
        "servers",
        "Key that is derived for one server; a gateway sets it for the servers that it starts.",
    ),
    (
        "`LUDUS_SERVER_ID`",
        "servers, `ludus.env.serving.server_keys`",
        "Name of the server in session ids. Default: derived from `POD_UID`, or random.",
    ),
    (
        "`POD_UID`",
        "servers, `ludus.env.serving.server_keys`",
        "uid of the server's pod, if `LUDUS_SERVER_ID` is not set.",
    ),
    (
        "`LUDUS_ENVIRONMENT`",
        "`python -m ludus.env` without arguments",
        "Package that the image of an environment serves.",
    ),
    (
        "`MAX_CONCURRENT_ENVS`",
        "servers of environment packages",
        "Maximum number of open sessions, as in OpenEnv's images; `--max-sessions` takes "
        "precedence.",
    ),
    (
        "`OPENENV_LEGACY_HTTP`",
        "servers, gateways",
        "Let HTTP calls without a session id use the session that was reset last, as in OpenEnv "
        "0.1. Off if empty, `0`, `false`, `no` or `off`.",
    ),
    (
        "`LUDUS_WORKER_PID`",
        "environments in workers",
        "Set by the server: the process id of the worker outside its namespace.",
    ),
    (
        "`GRPC_ENABLE_FORK_SUPPORT`",
        "gRPC",
        "Set to `false` by `ludus.env`, unless it is set.",
    ),
)
_RUNS = (
    (
        "`RAY_ADDRESS`",
        "runs",
        "Address of the Ray cluster that the run joins. Default: the run starts Ray on this "
        "machine.",
    ),
    (
        "`RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`",
        "Ray, runs",
        "Token of the Ray cluster, or the file with it. If a run starts Ray and the home folder "
        "cannot be written, it sets a random token.",
    ),
    ("`RAY_USE_TLS`", "Ray, runs", "`1` or `true`: the Ray cluster uses TLS."),
    (
        "`RAY_USAGE_STATS_ENABLED`",
        "Ray",
        "Set to `0` by a run, unless it is set: no statistics are sent.",
    ),
    (
        "`OMP_NUM_THREADS`",
        "runs on one machine, `ludus eval`",
        "Number of cores that the learner ranks and rollout workers of a run divide, unless "
        "`learner.num_threads` and `rollout.num_threads` are set; number of threads of `ludus "
        "eval --model`. Default: the CPUs that the process may use.",
    ),
    (
        "`LUDUS_CONTROL_FILE`",
        "runs",
        "A second control file, in addition to `control.json` in the run folder. `ludus submit` "
        "sets it.",
    ),
    (
        "`LUDUS_AGENT_TOKEN`",
        "runs",
        "Token of an agent's service, if `agent.token_env` has no other name.",
    ),
    (
        "`WANDB_API_KEY`",
        "runs with `[metrics.wandb]`, Forge's configurations",
        'Key of Weights & Biases. Required with `mode = "online"`. With Forge\'s configurations, '
        "the mode is `offline` if the key is not set.",
    ),
    (
        "`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`",
        'obstore, with `weights.kind = "s3"`',
        "Credentials of the bucket, for driver, learner and rollout workers.",
    ),
    (
        "`CUDA_VISIBLE_DEVICES`",
        "training runs",
        "GPUs of the machine that the run may use. Each process of the run sees only the GPUs that "
        "it reserves, and none without a reservation.",
    ),
    (
        "`PYTORCH_ALLOC_CONF`, `PYTORCH_CUDA_ALLOC_CONF`",
        "learner ranks",
        "Settings of torch's allocator on a GPU. Default: `expandable_segments:True`.",
    ),
    (
        "`VLLM_TARGET_DEVICE`",
        "vLLM",
        "`cpu` lets vLLM's build for GPUs compute on the CPU, if the build supports this.",
    ),
    (
        "`VLLM_ENABLE_V1_MULTIPROCESSING`, `VLLM_USE_V2_MODEL_RUNNER`",
        "vLLM",
        "Set by rollout workers; do not change them.",
    ),
    (
        "`TOKENIZERS_PARALLELISM`, `HF_HUB_DISABLE_PROGRESS_BARS`",
        "Hugging Face's libraries",
        "Set to `false` and `1` by the trainer, unless they are set.",
    ),
    (
        "`LOCAL_RANK`",
        "torch",
        "Removed by learner ranks.",
    ),
    (
        "`LD_PRELOAD`",
        "the dynamic linker",
        "Kept when a rollout worker starts vLLM, which would change it.",
    ),
)
_AGENTS = (
    (
        "`OPENAI_BASE_URL`, `OPENAI_API_BASE`, `OPENAI_API_KEY`, `OPENAI_MODEL`",
        "programs of agents",
        "Set for each episode: the endpoint of the policy, its key and the model's name.",
    ),
    ("`LUDUS_TASK`", "programs of agents", "Set for each episode: the task as JSON."),
    (
        "`LUDUS_MCP_URL`",
        "programs of agents",
        "Set for each episode if the environment has tools: the address of its MCP endpoint.",
    ),
    (
        "`NO_PROXY`, `no_proxy`",
        "programs of agents, runs with agents",
        "Extended by the hosts of the endpoint, so that no proxy gets these requests.",
    ),
    (
        "`PYTHONPATH`, `VIRTUAL_ENV`",
        "runs with agents",
        "Folders that the program of an agent may read in its sandbox.",
    ),
    (
        "`OPENAI_API_KEY`",
        "`ludus eval --endpoint`",
        "Token of the endpoint, if `--token-env` has no other name.",
    ),
)
_MODELS = (
    (
        "`HF_ENDPOINT`",
        "`ludus model get`, Hugging Face's libraries",
        "Mirror of Hugging Face.",
    ),
    (
        "`HF_HUB_OFFLINE`",
        "`ludus model get`, Hugging Face's libraries",
        "Do not use Hugging Face over the network, unless it is empty, `0`, `off`, `no` or "
        "`false`.",
    ),
    (
        "`HF_TOKEN`, `HF_HOME`",
        "Hugging Face's libraries",
        "Token for gated models and uploads, and the folder of downloaded models.",
    ),
    (
        "`PYTHONHASHSEED`",
        "`reasoning_gym_env`",
        "Hash seed of Python. Five generators refuse to start without a fixed seed, such as 0.",
    ),
    ("`KUBECONFIG`", "`ludus submit` and the other commands for clusters", "File, as in kubectl."),
    (
        "`KUBERNETES_SERVICE_HOST`, `KUBERNETES_SERVICE_PORT`",
        "gateways and commands in a pod",
        "Address of the API server, set by Kubernetes.",
    ),
)
_WORKERS = """
Workers with isolation `pool` or `process`, and programs of agents, get few variables of their
server or run: `--pass-env NAME`, or `agent.pass_env`, adds others. Programs of `coding_env` get
`PATH` and `LD_LIBRARY_PATH` only. [security.md](security.md#the-workers-sandbox) has the details.
A configuration of Forge can refer to any variable: `${oc.env:NAME,default}`.
"""
_OPTIONS = """
The server program of an environment package, such as `python -m coding_env.server.app`, and its
image read these variables. A flag takes precedence over `--options`, which takes precedence over
variables. `ludus env serve`, gateways and runs do not read them.
"""


def make_page() -> str:
    """Return the text of the page."""
    page = INTRODUCTION
    for title, rows in (
        ("Servers and gateways", _SERVERS),
        ("Runs", _RUNS),
        ("Agents", _AGENTS),
        ("Models and clusters", _MODELS),
    ):
        page += f"\n## {title}\n\n{make_table(_HEAD, *rows)}"
    page += f"\n## Workers and programs\n{_WORKERS}\n## Options of environments\n{_OPTIONS}"
    for readme, options_type in find_option_models():
        json_variable = make_variable_name(options_type, "options")
        page += f"\n### {readme.parent.name}\n\n"
        if not options_type.model_fields:
            page += "No options.\n"
            continue
        page += f"`{json_variable}` contains all options as one JSON object.\n\n"
        page += f"{format_option_table(options_type)}\n"
    return page


if __name__ == "__main__":
    write_or_check_page("variables.md", make_page())
