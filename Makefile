# Two commands do everything on a fresh machine: `make run` and `make test`.
# EXTRA=cpu (default) installs the CPU build of vLLM, EXTRA=gpu the CUDA build. pip's own configuration is respected.
# All paths are relative, so a checkout in a folder with a space works.

PYTHON ?= python3
EXTRA  ?= cpu
PY     := .venv/bin/python
STAMP  := .venv/.installed-$(EXTRA)
ARGS   ?=

export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install run test lint check bench clean

help:
	@echo "make run     set up .venv, then train the embedded default (+exp=tiny); ARGS='seed=1' adds overrides"
	@echo "make test    the whole test suite in the same environment; ARGS='-k roles' goes to pytest"
	@echo "make lint    ruff and pyright"
	@echo "make check   lint, types and architecture tests, within a minute"
	@echo "make bench   the benchmarks"
	@echo "make install only set up .venv (EXTRA=cpu|gpu)"

install: $(STAMP)

# torchvision, torchaudio and torchcodec come with vLLM; text models need none of them, and builds that do not match
# torch's break `import transformers`.
$(STAMP): pyproject.toml
	@case "$(EXTRA)" in cpu|gpu) ;; *) echo "EXTRA=$(EXTRA): expected cpu or gpu" >&2; exit 2;; esac
	@if [ -e .venv ] && ls .venv/.installed-* >/dev/null 2>&1 && [ ! -e $(STAMP) ]; then \
	  echo ".venv holds the other build of vLLM; run 'make clean' first" >&2; exit 2; fi
	@[ -x $(PY) ] || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet -e ".[$(EXTRA),dev]"
	$(PY) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $(STAMP)

# The local Ray cluster of a run gets a token of its own, so nothing is written to the home folder.
run: install
	@RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$$($(PY) -c 'import secrets; print(secrets.token_hex(32))') \
	  $(PY) -m akl_dist.main +exp=tiny cluster.address=local $(ARGS)

# Two processes: tests of the whole stack one after another in one, everything else beside them (tests/conftest.py).
test: install
	$(PY) -m pytest -n 2 $(ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m pyright

check: lint
	$(PY) -m pytest -q tests/architecture

bench: install
	$(PY) -m benchmarks

clean:
	rm -rf .venv
