PYTHON ?= python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install train test test-slow lint format bench ci clean

help:  ## list these words
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install:  ## install for development, in the tested versions
	$(PYTHON) -m pip install -c constraints.txt -e ".[dev]"

train:  ## train on CartPole-v1; more settings in ARGS="seed=1 group.size=16"
	$(PYTHON) -m grpo_agents.train env=CartPole-v1 $(ARGS)

test:  ## run the tests that take seconds
	$(PYTHON) -m pytest $(ARGS)

test-slow:  ## run the tests in which an agent learns (minutes)
	$(PYTHON) -m pytest -m slow $(ARGS)

lint:  ## check style and types
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:  ## rewrite the code in the project's format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench:  ## measure CartPole-v1 against its baselines (about an hour)
	$(PYTHON) -m pip install -c constraints.txt -e ".[bench]"
	$(PYTHON) experiments/bench_cartpole.py $(ARGS)

ci:  ## everything that has to pass before a merge, in a fresh virtual environment
	.ci/run

clean:  ## remove caches and build products; runs/ stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
