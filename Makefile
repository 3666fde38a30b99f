# Everything a developer or CI does. Needs Python 3.11 or newer, as the locked versions do, and make.
# With another Python, in an environment of its own: make demo PYTHON=/usr/bin/python3 VENV=.venv-system

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
STUBS_VENV := .venv-stubs
STUBS_INSTALLED := $(STUBS_VENV)/.installed
XLA_VENV := .venv-xla
XLA_BIN := $(XLA_VENV)/bin
XLA_INSTALLED := $(XLA_VENV)/.installed
FRAMEWORKS_VENV := .venv-frameworks
FRAMEWORKS_BIN := $(FRAMEWORKS_VENV)/bin
FRAMEWORKS_INSTALLED := $(FRAMEWORKS_VENV)/.installed
# Of torch, for `make test-torch`: the newest there is.
VERSION := 2.15.0
TORCH_VENV := .venv-torch-$(VERSION)
PIP := python -m pip --disable-pip-version-check
# Tests start hundreds of interpreters: each would compile this checkout's modules again.
unexport PYTHONDONTWRITEBYTECODE

PROTOS = $(notdir $(wildcard proto/pannier/v1/*.proto))
# $(1): where the stubs go, relative to proto/. Without those of files that have no service.
generate = cd proto && ../$(STUBS_VENV)/bin/python -m grpc_tools.protoc -I. \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(addprefix pannier/v1/,$(PROTOS)) && \
	grep --files-without-match 'class .*Stub' $(1)/pannier/v1/*_pb2_grpc.py | xargs rm

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-store pytest lint format stubs check-stubs check-layers check-words docs demo-xla test-xla test-torch test-frameworks test-cluster chaos bench pictures tools images lock clean distclean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## Train, kill, restore: what Pannier does, in under three minutes
	$(BIN)/python tests/demo/run.py

demo-xla: $(XLA_INSTALLED)  ## The same as an SPMD program of torch_xla, on virtual devices
	$(XLA_BIN)/python tests/demo/run.py --xla

# Both environments are made at the same time, and most of the tests' time is waiting.
test:  ## What must pass with every change: lint and the tests, beside each other
	$(MAKE) --jobs=2 lint pytest

test-all: lint  ## The same, with pods, Slurm, browser, dashboard and more chaos
	$(MAKE) pytest ARGS='-m ""'

# Most of a test's time is waiting: more files run at a time than a small machine has cores.
# Slow files go first (deploy, faults, integration); by default those with the most tests would.
WORKERS ?= 6
# Neither compiling for XLA nor importing a framework is waiting.
XLA_WORKERS ?= 2
FRAMEWORKS_WORKERS ?= 2
pytest: $(INSTALLED)  ## The tests alone; choose some with ARGS="tests/unit -k cli"
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Its endpoint and credentials are the environment's: AWS_*, STORAGE_EMULATOR_HOST, PANNIER_STORAGE_OPTIONS.
test-store: $(INSTALLED)  ## What any store must pass: URL=s3://bucket/prefix, gs:// or file://
	@test -n "$(URL)" || { echo 'name the store: make test-store URL=s3://bucket/prefix' >&2; exit 2; }
	STORE_URL='$(URL)' $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		tests/store tests/unit/storage/test_stores.py $(ARGS)

# What has to do with torch's version: its planners, tensors, process groups and pickles.
WITH_TORCH := $(addprefix tests/, unit/client \
		$(addprefix unit/, wire/test_metadata_pickle.py wire/test_plan_codec.py coordinator/test_torch_pickles.py) \
		$(addprefix integration/test_, changing_structures.py checkpointable.py dcp_patch.py differing_replicas.py \
			groups.py loading.py loads_in_step.py overlapped_staging.py own_planner.py plan_cache.py same_plan.py \
			states.py storage_writer.py))
test-xla: $(XLA_INSTALLED)  ## The tests of torch_xla, and the client's with torch 2.9; takes 7 GB
	$(XLA_BIN)/python -m pytest -o cache_dir=.pytest_cache/xla --numprocesses $(XLA_WORKERS) --dist loadfile --no-loadscope-reorder \
		$(or $(ARGS),tests/xla $(WITH_TORCH))

# A CUDA build doesn't load without the libraries that it depends on: they are what takes the room.
test-torch: $(TORCH_VENV)/.installed  ## The client's tests with another torch, VERSION=2.15.0; takes 7 GB
	$(TORCH_VENV)/bin/python -m pytest -o cache_dir=.pytest_cache/torch --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
		$(or $(ARGS),$(WITH_TORCH))

test-frameworks: $(FRAMEWORKS_INSTALLED)  ## The adapters with the frameworks that they are for: torchtitan, Lightning, ...; takes 3 GB
	$(FRAMEWORKS_BIN)/python -m pytest -o cache_dir=.pytest_cache/frameworks --numprocesses $(FRAMEWORKS_WORKERS) --dist loadfile \
		--no-loadscope-reorder $(or $(ARGS),tests/frameworks)

test-cluster:  ## What deploy/README.md promises, on the cluster of KUBECONFIG: ROOT=gs://... SIDECAR=IMAGE COORDINATOR=IMAGE
	@tests/cluster/run.sh

lint: $(INSTALLED) check-stubs check-words  ## Style, types, import layers, protos, freshness of the stubs, words
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(MAKE) check-layers
	cd proto && ../$(BIN)/buf lint
	cd proto && ../$(BIN)/buf format --diff --exit-code

# It looks for modules where an imported package says that they are, and pannier is in three roots.
check-layers: $(INSTALLED)
	$(BIN)/python -c 'import pannier; from importlinter.cli import lint_imports_command as lint; lint()'

# In comments, texts and parts of identifiers; a line of .old-words is a regular expression.
check-words:
	@sed 's/.*/(^|[^[:alpha:]])(&)([^[:alpha:]]|$$)/' .old-words | LC_ALL=C grep -rniEI -f - --exclude='*_pb2*' \
		--exclude-dir=__pycache__ client service proto tests deploy docs README.md pyproject.toml Makefile; \
		test $$? -eq 1 || { echo 'these words of .old-words have others: see "Words" in CONTRIBUTING.md' >&2; exit 1; }

format: $(INSTALLED)  ## Rewrite sources and protos in the project's style
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	cd proto && ../$(BIN)/buf format --write

stubs: $(STUBS_INSTALLED)  ## Generate the Python stubs from the protos
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && ( $(call generate,$$new) ) && \
	for file in proto/pannier/v1/*_pb2*; do \
		[ -e "$$new/pannier/v1/$${file##*/}" ] || rm "$$file"; \
	done && \
	for file in "$$new"/pannier/v1/*; do \
		cmp -s "$$file" "proto/pannier/v1/$${file##*/}" || cp "$$file" proto/pannier/v1/; \
	done

check-stubs: $(STUBS_INSTALLED)
	@new=$$(mktemp -d) && trap 'rm -rf "$$new"' EXIT && ( $(call generate,$$new) ) && \
	for file in proto/pannier/v1/*_pb2*; do \
		diff -u "$$file" "$$new/pannier/v1/$${file##*/}" || \
		{ echo "$$file is stale: run 'make stubs'" >&2; exit 1; }; \
	done

docs: $(INSTALLED)  ## Write docs/cli.md from the commands' --help
	$(BIN)/python docs/write_cli.py > docs/cli.md.new
	mv docs/cli.md.new docs/cli.md

SEEDS ?= 1-10
MINUTES ?= 60
SECONDS ?= 16
ACT ?=
chaos: $(INSTALLED)  ## Kill, cut and stop all there is, at random: SEEDS=1-50 MINUTES=120
	PYTHONPATH=tests $(BIN)/python -m support.chaos.run --seeds $(SEEDS) --minutes $(MINUTES) --seconds $(SECONDS) \
		$(if $(ACT),--act $(ACT))

# What is only compared with; the bench says so when it isn't there.
PEERS := $(VENV)/peers
bench: $(INSTALLED)  ## Measure all that is promised, half an hour; needs a quiet machine
	@test -d $(PEERS) || $(BIN)/$(PIP) install --quiet --no-deps --target $(PEERS) -r tests/bench/peers.txt || true
	$(BIN)/python -m tests.bench.run $(ARGS)

pictures: $(INSTALLED)  ## Make the screenshots of docs/status-page.md again
	rm -f docs/status-page-*.png
	PYTHONPATH=tests $(BIN)/python -m support.network.page_states docs

# Some tests want more than Python: a browser for the status page, promtool for the alert rules. They
# are skipped where it isn't, but for CI.
TOOLS := chromium fonts-dejavu-core prometheus
tools:  ## Install Debian's packages that some tests want: chromium, promtool
	@command -v chromium > /dev/null && command -v promtool > /dev/null || \
		{ apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends $(TOOLS); }

# Where Debian's packages can't be had, the tests of the images are skipped.
IMAGE_TOOLS := buildah mmdebstrap
images:  ## Build both container images as root, without a registry, and show their sizes
	@command -v buildah > /dev/null && command -v mmdebstrap > /dev/null || \
		{ apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends $(IMAGE_TOOLS); } || \
		{ echo 'no images: $(IMAGE_TOOLS) are neither installed nor can they be' >&2; exit 0; }; \
	deploy/images/build.sh && sync

lock:  ## Resolve pyproject.toml again and rewrite requirements.lock and those beside it
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/$(PIP) install --quiet -e '.[dev]' hatchling==1.33.0
	sed -n '/^#/p' requirements.lock > requirements.lock.new
	.venv-lock/bin/$(PIP) freeze --all --exclude pip --exclude-editable \
		| sed -E -e '/^(nvidia-|cuda-|triton)/d' -e 's/^(torch==[^+]*).*/\1/' >> requirements.lock.new
	mv requirements.lock.new requirements.lock
	grep -v '^torch==' requirements.lock > .venv-lock/constraints.txt
	.venv-lock/bin/$(PIP) install --quiet -c .venv-lock/constraints.txt -e '.[xla]'
	sed -n '/^#/p' requirements-xla.lock > requirements-xla.lock.new
	.venv-lock/bin/$(PIP) freeze --exclude-editable \
		| sed -E '/^(nvidia-|cuda-|triton)/d' | grep -v -x -F -f requirements.lock >> requirements-xla.lock.new
	mv requirements-xla.lock.new requirements-xla.lock
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	grep -v -E '^(fsspec|gcsfs|s3fs)==' requirements.lock > .venv-lock/constraints.txt
	.venv-lock/bin/$(PIP) install --quiet -c .venv-lock/constraints.txt -r tests/frameworks/requirements.txt -e '.[dev]'
	sed -n '/^#/p' requirements-frameworks.lock > requirements-frameworks.lock.new
	.venv-lock/bin/$(PIP) freeze --exclude-editable | sed -E -e '/^(nvidia-|cuda-|triton)/d' -e 's/^(torch==[^+]*).*/\1/' \
		| grep -v -x -F -f requirements.lock >> requirements-frameworks.lock.new
	mv requirements-frameworks.lock.new requirements-frameworks.lock
	rm -rf .venv-lock

clean:  ## Remove caches and results, but not the environments
	rm -rf build dist bench-results .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find proto client service tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## Remove the environments too
	rm -rf $(VENV) $(STUBS_VENV) $(XLA_VENV) $(FRAMEWORKS_VENV) .venv-torch-* .venv-system

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one with PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "hint: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	$(BIN)/$(PIP) install --quiet -r requirements.lock
	$(BIN)/$(PIP) install --quiet --no-deps --no-build-isolation -e .
# Gigabytes that are still to be written would hold up the tests' own fsyncs for a minute.
	@sync
	@touch $@

# The versions of requirements.lock, but for what requirements-xla.lock has instead or beside them.
$(XLA_INSTALLED): requirements.lock requirements-xla.lock pyproject.toml
	@test -x $(XLA_BIN)/python || $(PYTHON) -m venv $(XLA_VENV)
	sed -n 's/^\([^#=]*==\).*/^\1/p' requirements-xla.lock | grep -v -i -f - requirements.lock \
		| cat - requirements-xla.lock > $(XLA_VENV)/requirements.txt
	$(XLA_BIN)/$(PIP) install --quiet -r $(XLA_VENV)/requirements.txt
	$(XLA_BIN)/$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# The same with requirements-frameworks.lock. A CPU build of torch comes without triton, which torchtitan imports.
$(FRAMEWORKS_INSTALLED): requirements.lock requirements-frameworks.lock pyproject.toml
	@test -x $(FRAMEWORKS_BIN)/python || $(PYTHON) -m venv $(FRAMEWORKS_VENV)
	sed -n 's/^\([^#=]*==\).*/^\1/p' requirements-frameworks.lock | grep -v -i -f - requirements.lock \
		| cat - requirements-frameworks.lock > $(FRAMEWORKS_VENV)/requirements.txt
	$(FRAMEWORKS_BIN)/$(PIP) install --quiet -r $(FRAMEWORKS_VENV)/requirements.txt
	@$(FRAMEWORKS_BIN)/python -c 'import triton' 2> /dev/null || $(FRAMEWORKS_BIN)/$(PIP) install --quiet --no-deps triton==3.6.0
	$(FRAMEWORKS_BIN)/$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@sync
	@touch $@

# The versions of requirements.lock, but for torch and what it depends on.
.venv-torch-%/.installed: requirements.lock pyproject.toml
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' requirements.lock > $(@D)/requirements.txt
	$(@D)/bin/$(PIP) install --quiet -r $(@D)/requirements.txt
	$(@D)/bin/$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(STUBS_INSTALLED): proto/requirements.lock
	@test -x $(STUBS_VENV)/bin/python || $(PYTHON) -m venv $(STUBS_VENV)
	$(STUBS_VENV)/bin/$(PIP) install --quiet -r proto/requirements.lock
	@touch $@
