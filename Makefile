# Needs python3 (3.11 or later), git and make; everything else goes into $(VENV).
#   make demo    the whole pipeline at a tiny size: tasks, model, SFT, PPO, evaluation, report
#   make test    the tests        make test ARGS="-k routes -x"   PYTHON=python3.13 make test
#   make lint    ruff and mypy
#   make image   the base image of the shipped tasks, on the engine of DOCKER_HOST (needs root)
#   make bench   every benchmark; the last line of each is one JSON document
#   make venv    only the environment, with EXTRAS (test; also hf, tpu)
#   make clean   removes the environment and caches; not runs/

PYTHON ?= python3
VENV   ?= .venv
EXTRAS ?= test
JOBS   ?= auto
CONFIG ?= configs/tiny.yaml
ARGS   ?=
export PYTHON

# Programs that several test processes need are compiled once, here.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
# Huge pages: without them page faults are a third of a training step on CPU (docs/model.md).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: demo test lint bench image venv clean

demo:
	./setup_venv.sh $(VENV)
	./setup_sandbox.sh --local
	JAX_PLATFORMS=$${JAX_PLATFORMS:-cpu} $(VENV)/bin/t1jax run $(CONFIG) $(ARGS)

test: venv
	$(VENV)/bin/python -m pytest --numprocesses $(JOBS) --dist loadscope --durations 15 $(ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: venv
	@for file in tests/benchmarks/model.py tests/benchmarks/conversion.py \
	    tests/benchmarks/sandboxes.py tests/benchmarks/trajectory.py tests/benchmarks/sampling.py \
	    tests/benchmarks/training.py; do \
	    echo "== $$file"; $(VENV)/bin/python "$$file" || exit 1; \
	done

image: venv
	./setup_sandbox.sh
	PYTHON=$(CURDIR)/$(VENV)/bin/python sandbox/images/make_base.sh

venv:
	@./setup_venv.sh $(VENV) $(EXTRAS)

clean:
	rm -rf $(VENV) .venv313 .cache .mypy_cache .ruff_cache .pytest_cache build *.egg-info
