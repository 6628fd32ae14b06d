# make demo and make test do everything from a fresh clone on; the rest needs one of them first.

BUILD := build/release
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
INSTALLED := .venv/torchrpc.installed
# What tools/setup.sh makes the environment for.
SETUPS := $(addprefix setup-,demo test clang tidy check bench abi headers lint docs wheels)
# The build that tools/setup.sh starts. Indirect, because make -n runs a recipe that names MAKE itself.
MAKE_PACKAGE = $(MAKE) package
# Python keeps what it has compiled: hundreds of processes of the tests import the same modules.
export PYTHONDONTWRITEBYTECODE :=
# How far a build is: a line that Ninja prints.
export NINJA_STATUS ?= [%f of %t, %es] $()

.PHONY: demo test slow-test check abi aarch64 conformance bench bench-cpp docs cpp-docs tutorial-results dist wheels matrix lint format asan tsan no-tensorpipe asan-mixed public-sanitizers tidy fuzz headers mutants package build-asan build-tsan build-no-tensorpipe build-fuzz $(SETUPS) clean
.DEFAULT_GOAL := test

# Trains CartPole through RPC until it is solved; the learning curve is in reinforcement_learning.png.
demo:
	tools/setup.sh demo $(MAKE_PACKAGE)
	$(PYTHON) -m torchrpc tutorials/reinforcement_learning.py $(ARGS)

# The C++ tests, then the Python tests of behaviour, without the slow ones; tests/TIMES.md has the time of each file.
test:
	tools/setup.sh test $(MAKE_PACKAGE)
	cmake --build $(BUILD)
	ctest --preset release --parallel 3
	$(PYTHON) tools/run_tests.py --quick $(ARGS)

# The slow Python tests.
slow-test: setup-test
	$(MAKE) package
	cmake --build $(BUILD)
	$(PYTHON) tools/run_tests.py --slow $(ARGS)

# All that a change must pass, as in continuous integration.
check:
	.ci/run

# Compiles for aarch64 and runs the C++ tests, and a smoke test of the wheel, in an emulator: slow. tools/aarch64.sh says
# what that shows; ARGS="build cpp" for some of its steps, ONLY="base wire" for some of the tests.
aarch64: setup-test
	tools/aarch64.sh $(ARGS)

# The RPC tests that ship inside torch, run on torchrpc; those for GPUs on simulated ones.
conformance: setup-test
	$(MAKE) package
	$(PYTHON) tests/conformance/run.py $(ARGS)
	cmake --build $(BUILD) --target simulated_accelerator
	$(PYTHON) tests/accelerator/torch_cuda_tests.py

# torchrpc beside torch's own RPC: about an hour; ARGS=--quick for a glance. Results in build/compare.{json,png}.
bench: setup-demo
	$(MAKE) package
	$(PYTHON) benchmarks/compare --output=build/compare $(ARGS)

# The parts of the C++ core.
bench-cpp: setup-bench
	cmake --preset release -DTORCHRPC_BUILD_BENCHMARKS=ON
	cmake --build $(BUILD) --target cpp_benchmarks
	$(BUILD)/benchmarks/cpp_benchmarks $(ARGS)

# The site, from docs/ and the docstrings: build/docs/index.html. Warnings are errors.
docs: setup-docs
	$(MAKE) package
	$(PYTHON) -m sphinx -W --keep-going -b html docs build/docs $(ARGS)

# What the tutorials print and draw, for their pages on the site; ARGS="rnn pipeline" for some of them.
tutorial-results: setup-test
	$(MAKE) package
	PYTHON=$(abspath $(PYTHON)) tools/tutorial_results.sh $(ARGS)

# An sdist, and a wheel built from it, in dist/; then the wheel is tried in a fresh environment.
dist: setup-wheels
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist
	tools/check_wheel.sh dist/torchrpc-*.whl

# A wheel for each Python that this machine has, in dist/, with binaries for each release of torch; each is tried.
wheels: setup-wheels
	$(PYTHON) tools/wheels.py $(ARGS)

# The wheels with each release of torch and each Python: a table. ARGS="--torch 2.16" tries one that is not supported yet.
matrix: setup-wheels
	$(PYTHON) tools/matrix.py $(ARGS)

# ruff, clang-format, mypy: what pre-commit runs, over all files. And the tests of names, documents and layers.
lint: setup-lint setup-test
	$(MAKE) package
	$(PYTHON) -m pytest -q -n 2 -m lint
	ruff check .
	ruff format --check .
	mypy
	git ls-files '*.cpp' '*.h' | xargs clang-format --dry-run --Werror

# Compiles csrc against the headers of the oldest and the newest supported release of torch; ARGS="--torch 2.12" for others.
headers: setup-headers
	$(PYTHON) tools/torch_headers.py $(ARGS)

format: setup-lint
	ruff check --fix .
	ruff format .
	git ls-files '*.cpp' '*.h' | xargs clang-format -i

# The C++ tests as for a torch without TensorPipe, and under the sanitizers. They and the next two are clang's: it compiles
# them faster, and checks which mutex guards what.
no-tensorpipe asan tsan: %: build-%
	ctest --preset $@ --parallel 3

build-no-tensorpipe build-asan build-tsan build-fuzz: setup-clang
build-no-tensorpipe build-asan build-tsan:
	cmake --preset $(@:build-%=%)
	cmake --build --preset $(@:build-%=%)
build-fuzz:
	cmake --preset clang
	cmake --build --preset fuzz

# clang-tidy over csrc; ARGS=transport for those whose names match.
tidy: setup-tidy
	tools/tidy.sh $(ARGS)

# The decoders of what unauthenticated peers may send, under libFuzzer: RUNS=... executions of each, or SECONDS_EACH=...
fuzz: build-fuzz
	$(MAKE) package
	RUNS=$(RUNS) SECONDS_EACH=$(SECONDS_EACH) tests/fuzz/run.sh

# Breaks lines of the core one at a time, and shows which of these mutants the C++ tests notice: about an hour. An
# interrupted run continues. ARGS="--seed 2" draws others; tools/mutants.py --help.
mutants: setup-test
	$(PYTHON) tools/mutants.py $(ARGS)

# Groups of Python workers and a C++ worker that runs under AddressSanitizer.
asan-mixed: setup-clang
	$(MAKE) package
	cmake --preset asan
	cmake --build --preset asan --target mixed_worker
	TORCHRPC_MIXED_WORKER=build/asan/tests/cpp/mixed_worker $(PYTHON) -m pytest tests/python/test_mixed_groups.py

# A program that uses every public class, built outside of the tree with the installed library, under both sanitizers.
public-sanitizers: setup-clang
	cmake --preset asan
	cmake --build --preset asan --target torchrpc
	cmake --preset tsan
	cmake --build --preset tsan --target torchrpc
	tools/public_sanitizers.sh asan tsan

# Whether programs that were built with an earlier patch version still run: compares with tests/abi; ARGS=--write keeps
# the interface as it is now.
abi: setup-abi
	$(MAKE) package
	$(PYTHON) tools/check_abi.py $(ARGS)

# The pages of the C++ API, in build/cpp-docs/html. Needs doxygen.
cpp-docs:
	mkdir -p build
	doxygen tools/Doxyfile

# The package in .venv is this tree (an editable install); its binaries are put into python/torchrpc.
package:
	cmake --preset release
	cmake --build $(BUILD) --target torchrpc_package
	cmake --install $(BUILD) --component python --prefix python/torchrpc
	$(MAKE) $(INSTALLED)

$(INSTALLED): setup.py pyproject.toml CMakeLists.txt
	TORCHRPC_BUILD_DIR=$(BUILD) TORCHRPC_CMAKE_ARGS=-DTORCHRPC_BUILD_TESTS=ON \
	  flock .venv/pip.lock $(PYTHON) -m pip install --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

setup-demo setup-test setup-clang setup-tidy setup-check setup-bench setup-abi setup-headers setup-lint setup-docs setup-wheels:
	tools/setup.sh $(@:setup-%=%)

# All that was built; not .venv.
clean:
	rm -rf build dist python/torchrpc/_built
	rm -f $(INSTALLED)
