# Everything here works on a machine that has just make, a C compiler and Python 3.11 or newer: the first call sets up
# .venv. Only tests need the compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNEL := hatch_build.py $(wildcard runtime/estream_runtime/native/*.[ch]) \
	$(addprefix runtime/estream_runtime/native/,compiling.py paths.py)
DEMO := build/demo
PACKAGE := $(DEMO)/sample.emoe
FUZZ_SECONDS ?= 60
FUZZ_SEED ?= 0

.PHONY: help demo test lint check bench bench-large bench-peers bench-decode fuzz conformance clean

help:
	@echo "make demo   pack the sample model and generate text with it, through an arena far smaller than the package"
	@echo "make test   run the tests"
	@echo "make check  formatting, lint, types, import rules, then the tests"
	@echo "make bench  measure what README claims: quality, packing, damaged packages, the pipeline, the planner (two hours)"
	@echo "make bench-large  the pipeline with a model of 46.7 billion weights, for which it writes a file of 25 GB"
	@echo "make bench-peers  race llama.cpp and ik_llama.cpp, which it builds first; needs root, cmake and 12 GB (an hour)"
	@echo "make bench-decode  decoding in little memory: what a cache and reading ahead are worth, and the others (an hour)"
	@echo "make fuzz   search for bytes that break a reader, for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make conformance  run the whole conformance suite over this loader's program (ten minutes)"
	@echo "make clean  remove what these made"

demo: $(INSTALLED)
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/estream-pack sample $(DEMO)/checkpoint
	$(BIN)/estream-pack build $(DEMO)/checkpoint -o $(PACKAGE)
	$(BIN)/estream-pack verify $(PACKAGE)
	$(BIN)/estream-run generate $(PACKAGE) --arena 256K --max-new-tokens 80 --temperature 0.7 --top-p 0.9 --seed 2 \
		--prompt "It was a fine morning, and"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(INSTALLED)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	git ls-files "*.c" "*.h" | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

bench: $(INSTALLED)
	$(BIN)/python tests/bench/quality.py
	$(BIN)/python tests/bench/pack_memory.py
	$(BIN)/python tests/bench/packing.py disk
	$(BIN)/python tests/bench/packing.py shards
	$(BIN)/python tests/bench/broken_builds.py
	$(BIN)/python tests/bench/mutations.py --count 100000
	$(BIN)/python tests/bench/mutations.py --flips
	$(BIN)/python tests/bench/vectors.py
	$(BIN)/python tests/bench/readers.py
	$(BIN)/python tests/bench/pipeline.py --dense w4g32
	$(BIN)/python tests/bench/planner.py
	$(BIN)/python tests/bench/apex_simulation.py
	$(BIN)/python tests/bench/retention.py
	$(BIN)/python tests/bench/kernel.py
	$(BIN)/python tests/bench/kernel.py --threads 1 --tokens 1
	$(BIN)/python tests/bench/startup.py

bench-large: $(INSTALLED)
	$(BIN)/python tests/bench/packing.py large
	$(BIN)/python tests/bench/pipeline.py --shape mixtral-8x7b --dense w4g32 --arena 256M --limit 2G --ratio 1.2 --rounds 1 \
		--part time

bench-peers: $(INSTALLED)
	@mkdir -p build/bench
	$(BIN)/python tests/bench/race.py --tokens 128 --tokens 512 --tokens 2048 --json build/bench/race.json \
		--picture build/bench/race.svg

bench-decode: $(INSTALLED)
	@mkdir -p build/bench
	$(BIN)/python tests/bench/decode.py
	$(BIN)/python tests/bench/stall_free.py
	$(BIN)/python tests/bench/decode_race.py --skew 1 --json build/bench/decode_race.json

fuzz: $(INSTALLED)
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(FUZZ_SECONDS) --seed $(FUZZ_SEED) --jobs 2

conformance: $(INSTALLED)
	$(BIN)/estream-conformance run "$(BIN)/python -m estream_loader.verdict"

clean:
	rm -rf $(VENV) build .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache \
		runtime/estream_runtime/native/kernel-*.so

# Installing again compiles the kernel again.
$(INSTALLED): pyproject.toml $(KERNEL)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, and $(PYTHON) is not: name one with make PYTHON=..." >&2; exit 1; }
	@echo "setting up $(VENV), which takes a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
