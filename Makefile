# An index: each target is one line; the scripts behind the targets are in dev/.
PYTHON ?= python3.11
ACCELERATOR ?=
GENERATOR ?= transformers
TORCH_INDEX_URL ?=
MODEL ?=
MODEL_FOLDER := .cache/models/$(MODEL)
NAME ?= demo$(if $(MODEL),-$(MODEL))$(if $(filter vllm,$(GENERATOR)),-vllm)
RUN_OPTIONS = --overwrite --set name=$(NAME) --set generator.kind=$(GENERATOR) $(if $(SEED),--set seed=$(SEED))
override VENV := .venv/bin
# Test files are distributed over processes, slow files first (tests/conftest.py). Fast tests mostly
# wait, so they may use more processes than cores; whole runs keep more than a core busy.
PYTEST := $(VENV)/python -m pytest --dist loadscope --no-loadscope-reorder --durations=25
LOCAL_TESTS := not conformance and not chaos and not cluster and not attack

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-model learn learn-examples learn-reward learn-language learn-real learn-forge learn-trl learn-agents learn-classic test test-long test-again test-fast test-pythons chart-test conformance chaos attack soak lint bench bench-env bench-train bench-classic dist dist-test docs proto images cluster-test clean

help:       ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

setup:      ## make .venv with locked versions (ACCELERATOR=cpu|cuda, PYTHON=, TORCH_INDEX_URL=)
	@VENV=.venv PYTHON=$(PYTHON) ACCELERATOR=$(ACCELERATOR) TORCH_INDEX_URL=$(TORCH_INDEX_URL) bash dev/setup.sh

demo: setup ## train a language model at blackjack, or a real one at sums (MODEL=smollm2, GENERATOR=vllm, SEED=, ARGS=)
	@$(if $(MODEL),$(MAKE) --no-print-directory demo-model,$(VENV)/ludus train examples/blackjack/tiny.toml $(RUN_OPTIONS) $(ARGS))

demo-model: setup
	@test -d $(MODEL_FOLDER) || $(VENV)/ludus model get $(MODEL) $(MODEL_FOLDER)
	@$(VENV)/ludus train examples/math/$(MODEL).toml --set model.path=./$(MODEL_FOLDER) $(RUN_OPTIONS) $(ARGS)

learn: setup ## train every example with three seeds and evaluate them (ARGS="--only catch")
	@$(if $(ARGS),$(VENV)/python bench/learn.py $(ARGS),$(MAKE) --no-print-directory -k learn-examples learn-reward learn-language learn-forge learn-trl learn-agents learn-classic)

learn-examples: setup
	@$(VENV)/python bench/learn.py $(ARGS)

learn-reward: setup ## learning proof of the reward model (ARGS="--only preferences --seeds 0")
	@$(VENV)/python bench/learn_reward.py $(ARGS)

learn-language: setup ## learning proofs of chains of thought, summaries and RLHF (ARGS="--only cot")
	@$(VENV)/python bench/learn_language.py $(ARGS)

learn-real: setup ## learning proofs of a real language model, for hours (ARGS="--only sums --seeds 0")
	@$(VENV)/python bench/learn_real.py $(ARGS)

learn-forge: setup ## learning proof of the Forge tutorial, with a control (ARGS="--only control")
	@$(VENV)/python bench/forge.py $(ARGS)

learn-trl: setup ## learning proof of TRL's echo script, with a control; cost of the wire for TRL's trainer
	@$(VENV)/python bench/trl_echo.py
	@$(VENV)/python bench/trl_wire.py

learn-agents: setup ## learning proofs of LangGraph and smolagents agents (ARGS="--only smolagents")
	@$(VENV)/python bench/learn_agents.py $(ARGS)

learn-classic: setup ## learning proofs of networks in Gymnasium environments (ARGS="--only pendulum")
	@$(VENV)/python bench/classic.py $(or $(ARGS),--only lunar_lander pendulum frozen_lake value shuffled)

test: setup ## run the tests of every part, and a whole run of each kind
	@$(PYTEST) -n 2 --junit-xml=.cache/tests.xml -m "not long and $(LOCAL_TESTS)"
	@$(VENV)/python dev/durations.py check test

test-long: setup ## run the longer tests: further whole runs, faults and notebooks
	@$(PYTEST) -n 2 --junit-xml=.cache/tests-long.xml -m "long and $(LOCAL_TESTS)"
	@$(VENV)/python dev/durations.py check test-long

test-again: ## run the tests that failed last again, alone; at most five
	@$(VENV)/python dev/test_again.py

test-fast: setup ## run the tests that start no process, with fewer random examples
	@$(PYTEST) -n 3 -p no:schemathesis --hypothesis-profile=quick -m "not slow and $(LOCAL_TESTS)"

test-pythons: ## run the fast tests with Python 3.12 and 3.13, if they are installed
	@bash dev/test_pythons.sh

chart-test: setup ## test the Helm chart without a cluster
	@$(PYTEST) -n 2 tests/charts

conformance: setup ## test with third-party clients, servers and OpenEnv's validator
	@$(VENV)/python -m pytest -m conformance tests/conformance tests/env/test_openenv_adapter.py

chaos: setup ## run blackjack with faults, next to undisturbed runs
	@$(VENV)/python -m pytest -m chaos -s tests/chaos

attack: setup ## attack servers, runs and files with hostile inputs of every known kind
	@$(PYTEST) -n 2 tests/attack

soak: setup ## inject faults into the environment plane for 20 minutes (ARGS="--minutes 60 --seed 7")
	@PYTHONPATH=dev:bench $(VENV)/python -m tests.soak $(ARGS)

lint: setup ## check style, import contracts, types and commit subjects
	@bash dev/lint.sh

bench: setup ## measure completions per second of both engines
	@$(VENV)/python bench/generators.py

bench-train: setup ## measure the training plane against plain loops, copies and TRL (ARGS="--only learner")
	@$(VENV)/python bench/train.py $(ARGS)

bench-classic: setup ## measure classic PPO against stable-baselines3 on CartPole
	@$(VENV)/python bench/classic.py --only cartpole $(ARGS)

bench-env: setup ## measure the environment plane against OpenEnv
	@$(VENV)/python bench/environments.py

dist: setup ## build the wheels and their lock files into dist/
	@bash dev/dist.sh

dist-test: dist ## install those wheels in a new environment and train from an empty folder
	@PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) bash dev/dist_test.sh

docs: setup ## build the documentation site into build/site and check its links, offline
	@bash dev/site.sh

proto: setup ## generate the gRPC stubs
	@$(VENV)/python dev/generate_proto.py

images:     ## build the container images (ARGS="--only gateway")
	@$(PYTHON) dev/images.py $(ARGS)

cluster-test: setup ## install and train on the cluster of KUBECONFIG (LUDUS_IMAGE_LOADER loads images)
	@bash dev/cluster_test.sh $(ARGS)

clean:      ## remove .venv, caches and runs
	@bash dev/clean.sh
