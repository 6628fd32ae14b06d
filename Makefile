# make demo and make test do everything from a fresh clone on; the rest needs one of them first.

BUILD := build/release
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
INSTALLED := .venv/torchrpc.installed
WHEEL_TOOLS := .venv/wheel-tools.installed

.PHONY: demo test abi aarch64 conformance bench bench-cpp docs cpp-docs tutorial-results dist wheels matrix lint format asan tsan no-tensorpipe asan-mixed public-sanitizers tidy fuzz package build-asan build-tsan build-no-tensorpipe build-fuzz setup-demo setup-test setup-clang setup-wheels clean
.DEFAULT_GOAL := test

# Trains CartPole through RPC until it is solved; the learning curve is in reinforcement_learning.png.
demo: setup-demo
	$(MAKE) package
	$(PYTHON) -m torchrpc tutorials/reinforcement_learning.py $(ARGS)

# The C++ tests, then the Python tests.
test: setup-test
	$(MAKE) package
	cmake --build $(BUILD)
	ctest --preset release
	$(PYTHON) -m pytest $(ARGS)

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
bench-cpp: setup-test
	cmake --preset release -DTORCHRPC_BUILD_BENCHMARKS=ON
	cmake --build $(BUILD) --target cpp_benchmarks
	$(BUILD)/benchmarks/cpp_benchmarks $(ARGS)

# The site, from docs/ and the docstrings: build/docs/index.html. Warnings are errors.
docs: setup-demo
	$(MAKE) package
	$(PYTHON) -m sphinx -W --keep-going -b html docs build/docs $(ARGS)

# What the tutorials print and draw, for their pages on the site; ARGS="rnn pipeline" for some of them.
tutorial-results: setup-demo
	$(MAKE) package
	PYTHON=$(abspath $(PYTHON)) tools/tutorial_results.sh $(ARGS)

# An sdist, and a wheel built from it, in dist/; then the wheel is tried in a fresh environment.
dist: $(WHEEL_TOOLS)
	rm -rf dist
	$(PYTHON) -m build --no-isolation --outdir dist
	tools/check_wheel.sh dist/torchrpc-*.whl

# A wheel for each Python that this machine has, in dist/, with binaries for each release of torch; each is tried.
wheels: $(WHEEL_TOOLS)
	$(PYTHON) tools/wheels.py $(ARGS)

# The wheels with each release of torch and each Python: a table. ARGS="--torch 2.16" tries one that is not supported yet.
matrix: $(WHEEL_TOOLS)
	$(PYTHON) tools/matrix.py $(ARGS)

# ruff, clang-format, mypy: what pre-commit runs, over all files.
lint: setup-demo
	ruff check .
	ruff format --check .
	mypy
	git ls-files '*.cpp' '*.h' | xargs clang-format --dry-run --Werror

format: setup-demo
	ruff check --fix .
	ruff format .
	git ls-files '*.cpp' '*.h' | xargs clang-format -i

# The C++ tests as for a torch without TensorPipe.
no-tensorpipe: build-no-tensorpipe
	ctest --preset $@

# The C++ tests under the sanitizers. They and the next two are clang's: as it compiles, it checks which mutex guards what.
asan tsan: %: build-%
	ctest --preset $@

build-no-tensorpipe: setup-test
build-asan build-tsan build-fuzz: setup-clang
build-no-tensorpipe build-asan build-tsan:
	cmake --preset $(@:build-%=%)
	cmake --build --preset $(@:build-%=%)
build-fuzz:
	cmake --preset clang
	cmake --build --preset fuzz

# clang-tidy over csrc; ARGS=transport for those whose names match.
tidy: setup-clang
	tools/tidy.sh $(ARGS)

# The decoders of what unauthenticated peers may send, under libFuzzer: RUNS=... executions of each, or SECONDS_EACH=...
fuzz: build-fuzz
	$(MAKE) package
	RUNS=$(RUNS) SECONDS_EACH=$(SECONDS_EACH) tests/fuzz/run.sh

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
abi: setup-test
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
	  $(PYTHON) -m pip install --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

setup-wheels: $(WHEEL_TOOLS)

$(WHEEL_TOOLS): requirements-wheels.txt | setup-demo
	$(PYTHON) -m pip install --disable-pip-version-check --requirement $<
	touch $@

setup-demo setup-test setup-clang:
	tools/setup.sh $(@:setup-%=%)

# All that was built; not .venv.
clean:
	rm -rf build dist python/torchrpc/_built
	rm -f $(INSTALLED)
