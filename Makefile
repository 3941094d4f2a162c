# An index: each target is one line; the scripts behind the targets are in dev/.
PYTHON ?= python3.11
ACCELERATOR ?=
GENERATOR ?= transformers
TORCH_INDEX_URL ?=
NAME ?= $(if $(filter vllm,$(GENERATOR)),demo-vllm,demo)
VENV := .venv/bin
# Processes share the files, what takes long first (tests/conftest.py). Fast tests mostly wait for
# each other, so there may be more of them than cores; whole runs keep more than a core busy.
PYTEST := $(VENV)/python -m pytest --dist loadscope --no-loadscope-reorder --durations=25

.DEFAULT_GOAL := help
.PHONY: help setup demo learn learn-examples learn-reward learn-language learn-forge learn-trl learn-agents learn-classic test test-again test-fast chart-test conformance chaos soak lint bench bench-env bench-train bench-classic dist dist-test docs proto images cluster-test clean

help:       ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:      ## make .venv with locked versions (ACCELERATOR=cpu|cuda, PYTHON=, TORCH_INDEX_URL=)
	@PYTHON=$(PYTHON) ACCELERATOR=$(ACCELERATOR) TORCH_INDEX_URL=$(TORCH_INDEX_URL) bash dev/setup.sh

demo: setup ## train a language model at blackjack, prove it (GENERATOR=vllm, SEED=, ARGS=)
	@$(VENV)/ludus train examples/blackjack/tiny.toml --overwrite --set name=$(NAME) --set generator.kind=$(GENERATOR) $(if $(SEED),--set seed=$(SEED)) $(ARGS)

learn: setup ## train every example with three seeds, judge what they learned (ARGS="--only catch")
	@$(if $(ARGS),$(VENV)/python bench/learn.py $(ARGS),$(MAKE) --no-print-directory -k learn-examples learn-reward learn-language learn-forge learn-trl learn-agents learn-classic)

learn-examples: setup
	@$(VENV)/python bench/learn.py

learn-reward: setup ## the same for the reward model (ARGS="--only preferences --seeds 0")
	@$(VENV)/python bench/learn_reward.py $(ARGS)

learn-language: setup ## the same for chains of thought, summaries and RLHF (ARGS="--only cot")
	@$(VENV)/python bench/learn_language.py $(ARGS)

learn-forge: setup ## the tutorial by Forge's calls, three seeds and a control (ARGS="--only control")
	@$(VENV)/python bench/forge.py $(ARGS)

learn-trl: setup ## TRL's echo script, three seeds and a control; what the wire costs TRL's own trainer
	@$(VENV)/python bench/trl_echo.py
	@$(VENV)/python bench/trl_wire.py

learn-agents: setup ## the same for agents of LangGraph and smolagents (ARGS="--only smolagents")
	@$(VENV)/python bench/learn_agents.py $(ARGS)

learn-classic: setup ## the same for networks in Gymnasium's environments (ARGS="--only pendulum")
	@$(VENV)/python bench/classic.py $(or $(ARGS),--only lunar_lander pendulum frozen_lake value shuffled)

test: setup ## all tests but those of `make conformance`, `chaos` and `cluster-test`
	@$(PYTEST) -n 2 --junit-xml=.cache/tests.xml -m "not conformance and not chaos and not cluster"
	@$(VENV)/python dev/durations.py check

test-again: ## run the tests that failed last again, alone; at most five
	@$(VENV)/python dev/test_again.py

test-fast: setup ## the tests that start nothing and take no time; a quarter of the random examples
	@$(PYTEST) -n 3 --hypothesis-profile=quick -m "not slow and not conformance and not chaos and not cluster"

chart-test: setup ## the Helm chart without a cluster: schemas, policies, golden files, refusals, dashboards
	@$(PYTEST) -n 2 tests/charts

conformance: setup ## upstream clients and environments on our servers, ours on theirs, OpenEnv's validator, an MCP client
	@$(VENV)/python -m pytest -m conformance tests/conformance tests/env/test_openenv_adapter.py

chaos: setup ## blackjack runs in which everything dies, fails and breaks, beside undisturbed ones
	@$(VENV)/python -m pytest -m chaos -s tests/chaos

soak: setup ## twenty minutes of random faults on the environment plane (ARGS="--minutes 60 --seed 7")
	@PYTHONPATH=dev:bench $(VENV)/python -m tests.soak $(ARGS)

lint: setup ## ruff, import contracts, types
	@bash dev/lint.sh

bench: setup ## answers per second of both generators, side by side
	@$(VENV)/python bench/generators.py

bench-train: setup ## the training plane beside bare loops, plain copies and TRL (ARGS="--only learner")
	@$(VENV)/python bench/train.py $(ARGS)

bench-classic: setup ## CartPole by classic PPO beside stable-baselines3, in turns
	@$(VENV)/python bench/classic.py --only cartpole $(ARGS)

bench-env: setup ## steps per second of the environment plane, beside OpenEnv's own
	@$(VENV)/python bench/environments.py

dist: setup ## build the wheels and their lock files into dist/
	@bash dev/dist.sh

dist-test: dist ## install those wheels in a new environment and train from an empty folder
	@PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) bash dev/dist_test.sh

docs: setup ## build the documentation site into build/site and check its links, offline
	@bash dev/site.sh

proto: setup ## generate the gRPC stubs again
	@$(VENV)/python dev/generate_proto.py

images:     ## container images with docker, podman or buildah, and their sizes (ARGS="--only gateway")
	@$(PYTHON) dev/images.py $(ARGS)

cluster-test: setup ## installs and trains on the cluster of KUBECONFIG (LUDUS_IMAGE_LOADER brings images)
	@bash dev/cluster_test.sh $(ARGS)

clean:      ## remove .venv, caches and runs
	@bash dev/clean.sh
