# Every target sets up what it needs; `make` alone prints this help.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

TASK ?= sst2
PRESET ?= tiny
PRECISION ?= auto
INIT ?=
DATA ?=
SEED ?=
SEEDS ?=
LAYERS ?=
HEAD ?=
NAME ?= default
GPUS ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
PLAYGROUND_PORT ?= 8003
REPOSITORY ?= model_repository
CONTAINER ?=
QUICK ?=
PYTHON ?= python3
# a CPU-only machine can be spared the CUDA libraries by PyTorch's own index of CPU wheels (see pytorch.org)
TORCH_INDEX_URL ?=
export TRITON_PYTHON

BERTSHIP := .venv/bin/bertship
TORCHRUN := .venv/bin/torchrun
RUN_STAMP := .venv/.run-installed
DEV_STAMP := .venv/.dev-installed
PINS := requirements/constraints.txt
PIP := .venv/bin/python -m pip --disable-pip-version-check --quiet

comma := ,
# one word of the shell, whatever is in it
quoted = '$(subst ','\'',$(1))'
option = $(if $($(1)),--$(2) $(call quoted,$($(1))))
SEEDED := $(if $(SEED),--set seed=$(SEED))
HEADED := $(if $(LAYERS),--set layers=$(LAYERS)) $(if $(HEAD),--set head=$(HEAD))
# of a server on another port: it is found where it is one of ours
ASKED_URL := $(if $(filter file,$(origin HTTP_PORT)),,--url http://127.0.0.1:$(HTTP_PORT))
PORTS := --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)
# taken as typed: no character of a text means anything to Make or to the shell
unexport TEXT TEXT_PAIR QUESTION CONTEXT
export ASK_TEXT := $(value TEXT)
export ASK_TEXT_PAIR := $(value TEXT_PAIR)
export ASK_QUESTION := $(value QUESTION)
export ASK_CONTEXT := $(value CONTEXT)
given = $(if $(filter command environment,$(firstword $(origin $(1)))),--$(2) "$$ASK_$(1)")

.PHONY: help setup demo test lint corpus pretrain ablation finetune evaluate export repository serve stop ask bench bench-peers playground plan gpu-check docs clean

help: ## This list
	@echo "bertship: text in, a measured BERT service out"; echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14 | sed 's/^/  make /'
	@echo; echo "  variables: TASK=$(TASK) PRESET=$(PRESET) PRECISION=$(PRECISION) INIT= DATA= SEED= SEEDS= LAYERS= HEAD= NAME=$(NAME) GPUS=$(GPUS) REPOSITORY=$(REPOSITORY)"
	@echo "  for serve: HTTP_PORT=$(HTTP_PORT) GRPC_PORT=$(GRPC_PORT) METRICS_PORT=$(METRICS_PORT)      for playground: PLAYGROUND_PORT=$(PLAYGROUND_PORT)"
	@echo "  for ask: TEXT= TEXT_PAIR= QUESTION= CONTEXT= HTTP_PORT= (else that of the running server)"
	@echo "  for set-up: PYTHON= TRITON_PYTHON= TORCH_INDEX_URL=      for gpu-check, plan: CONTAINER=      for bench-peers: QUICK=      for clean: ALL="

# a stamp, as a venv that was interrupted half-way has its interpreter already
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "error: $(PYTHON) is missing or older than Python 3.11; name one with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -m venv --clear .venv
	@touch $@

$(RUN_STAMP): $(PINS) pyproject.toml .venv/.made
	@echo "setting up .venv (log: .venv/setup.log)" >&2
	@if ! command -v nvidia-smi >/dev/null && [ -z "$(TORCH_INDEX_URL)" ]; then \
	  echo "no NVIDIA GPU found: TORCH_INDEX_URL= can name PyTorch's index of CPU wheels, a smaller download" >&2; fi
	@{ $(PIP) install -c $(PINS) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch && \
	   $(PIP) install -c $(PINS) hatchling editables && \
	   $(PIP) install -c $(PINS) --no-build-isolation -e '.[train,export,serve]'; } >.venv/setup.log 2>&1 || \
	  { grep -E '^ERROR' .venv/setup.log | tail -1 >&2 || true; echo "error: setting up .venv failed, see .venv/setup.log" >&2; exit 1; }
	@touch $@

# builds are isolated here, as seqeval comes as source alone and names what its build needs
$(DEV_STAMP): $(RUN_STAMP)
	@{ PIP_CONSTRAINT=$(PINS) $(PIP) install -c $(PINS) -e '.[train,export,serve,hub,scale,dev,docs,rtx]'; } >.venv/setup.log 2>&1 || \
	  { grep -E '^ERROR' .venv/setup.log | tail -1 >&2 || true; echo "error: setting up .venv failed, see .venv/setup.log" >&2; exit 1; }
	@touch $@

setup: $(RUN_STAMP) ## Set up .venv and the server's own .triton
	@.venv/bin/python -m serving.environment >/dev/null

demo: setup ## The whole line on real text: train, export, serve, ask; minutes on two cores
	@$(BERTSHIP) demo

test: $(DEV_STAMP) setup ## All tests, with the real Triton server
	@OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest

lint: $(DEV_STAMP) ## ruff, mypy, and imports that go one way
	@.venv/bin/ruff check . && .venv/bin/ruff format --check --quiet . && .venv/bin/mypy && .venv/bin/lint-imports

corpus: $(RUN_STAMP) ## Documents (DATA=file) to tokens and a vocabulary
	@$(BERTSHIP) corpus $(if $(DATA),$(call quoted,$(DATA))) --name $(call quoted,$(NAME)) $(SEEDED)

# one process a GPU; without GPUS, one process
LAUNCH = $(if $(filter-out 1,$(GPUS)),$(TORCHRUN) --standalone --nproc-per-node $(call quoted,$(GPUS)) -m bertship,$(BERTSHIP))

pretrain: $(RUN_STAMP) ## A PRESET: masked LM + next sentence, on GPUS, from scratch or from INIT
	@$(if $(filter-out 1,$(GPUS)),test -d runs/corpus/default || $(BERTSHIP) corpus >/dev/null)
	@$(LAUNCH) pretrain --preset $(call quoted,$(PRESET)) --name $(call quoted,$(NAME)) $(call option,INIT,init) $(SEEDED) $(if $(filter-out 1,$(GPUS)),,--bring)

ablation: $(RUN_STAMP) ## The paper's pre-training tasks compared, three seeds; an hour on two cores
	@.venv/bin/python -m benchmarks.ablation

finetune: $(RUN_STAMP) ## TASK on a warm start (INIT), with DATA; SEEDS=5 runs, on GPUS
	@$(LAUNCH) finetune --task $(call quoted,$(TASK)) --name $(call quoted,$(NAME)) --preset $(call quoted,$(PRESET)) $(call option,INIT,init) $(call option,DATA,data) $(call option,SEEDS,seeds) $(SEEDED) $(HEADED)

evaluate: $(RUN_STAMP) ## Metrics of a fine-tuned TASK
	@$(BERTSHIP) evaluate --task $(call quoted,$(TASK)) --name $(call quoted,$(NAME)) $(call option,DATA,data)

export: $(RUN_STAMP) ## TASK to ONNX, through the parity gate
	@$(BERTSHIP) export --task $(call quoted,$(TASK)) --name $(call quoted,$(NAME)) --precision $(call quoted,$(PRECISION)) --preset $(call quoted,$(PRESET)) $(call option,INIT,init) $(call option,DATA,data) --bring

repository: $(RUN_STAMP) ## TASK into the Triton model repository
	@$(BERTSHIP) repository --task $(call quoted,$(TASK)) --name $(call quoted,$(NAME)) --precision $(call quoted,$(PRECISION)) --preset $(call quoted,$(PRESET)) $(call option,INIT,init) $(call option,DATA,data) --repository $(call quoted,$(REPOSITORY)) --bring

# a server without any task has nothing to show
BRING_ONE = ls $(REPOSITORY)/*_encode/[0-9]*/model.onnx >/dev/null 2>&1 || \
  { echo "nothing in $(REPOSITORY) to serve yet: $(TASK) is made first, from its training on where that is missing" >&2; $(MAKE) repository; }

serve: setup ## Start Triton on all that has been exported
	@$(BRING_ONE)
	@$(BERTSHIP) serve --repository $(call quoted,$(REPOSITORY)) $(PORTS) --detach

stop: $(RUN_STAMP) ## Stop it
	@$(BERTSHIP) stop

ask: $(RUN_STAMP) ## Ask it: TASK=sst2 TEXT="..."
	@$(BERTSHIP) ask --task $(call quoted,$(TASK)) $(ASKED_URL) $(call given,TEXT,text) $(call given,TEXT_PAIR,text-pair) $(call given,QUESTION,question) $(call given,CONTEXT,context)

bench: setup ## Load TASK with perf_analyzer on real texts
	@$(BERTSHIP) bench --task $(call quoted,$(TASK)) --repository $(call quoted,$(REPOSITORY)) --bring

bench-peers: setup ## Beside transformers, optimum, FastAPI, MLServer: one page; 90 minutes (QUICK=1: a trial)
	@.venv/bin/python -m benchmarks.peers $(if $(QUICK),--quick)

# CONTAINER= names the image of NVIDIA's to run in; without it, TensorRT and the GPU are those of this machine
plan: $(if $(CONTAINER),,$(RUN_STAMP)) ## TASK's TensorRT plan, on the GPU's machine (CONTAINER=image)
	@$(if $(CONTAINER),export/container.sh $(call quoted,$(CONTAINER)) export bertship,$(BERTSHIP)) plan runs/export/$(call quoted,$(basename $(notdir $(TASK))))

gpu-check: $(if $(CONTAINER),,$(RUN_STAMP)) ## What only a GPU can show, in at most 8 minutes (CONTAINER=image)
	@$(if $(CONTAINER),GPU_RUNTIME=1 export/container.sh $(call quoted,$(CONTAINER)) train$(comma)export$(comma)serve python3,.venv/bin/python) -m benchmarks.gpu_check --export runs/export/$(call quoted,$(basename $(notdir $(TASK))))
playground: setup ## A web page to try what is served
	@$(BRING_ONE)
	@$(BERTSHIP) playground --repository $(call quoted,$(REPOSITORY)) --port $(PLAYGROUND_PORT) --bring

docs: $(DEV_STAMP) ## The documentation as a site, in build/site
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean: ## Remove runs, served weights and caches (ALL=1: the environments too)
	@if [ -x $(BERTSHIP) ]; then $(BERTSHIP) stop >/dev/null || true; fi
	@rm -rf runs dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find model_repository -name '*.onnx' -o -name '*.plan' -o -name 'task*.json' -o -name 'served.json' -o -name 'tokenizer.json' | xargs -r rm -f
	@if [ -n "$(ALL)" ]; then rm -rf .venv .triton; fi
	@echo "removed runs/ with every model in it, what was served, and caches$(if $(ALL), and .venv and .triton)" >&2
