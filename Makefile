# galloc is one header: nothing needs to be built to use it. This builds what shows, tests and measures it.
# `make` lists the targets.

# ---- tools ----------------------------------------------------------------------------------------------------------

ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif
CLANG ?= clang
CLANGXX ?= clang++
JOBS ?= $(or $(shell nproc 2>/dev/null),2)
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += $(if $(filter clean,$(MAKECMDGOALS)),,-j$(JOBS)) --no-print-directory
endif

# The CUDA Toolkit, where there is one. `make NVCC= ...` does as if there were no compiler.
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(firstword $(wildcard $(shell command -v nvcc)) \
	/usr/local/cuda/bin/nvcc))
# One that galloc cannot be compiled with is as none: the tests do not need it.
RUNTIME := $(wildcard $(CUDA_HOME)/include/cuda_runtime_api.h)
ifeq ($(if $(RUNTIME),$(shell awk '/define CUDART_VERSION/ { print ($$3 < 12000) }' $(RUNTIME))),1)
ifeq ($(MAKELEVEL),0)
$(info the CUDA Toolkit in $(CUDA_HOME) is older than 12.0 and left out; CUDA_HOME=... names another one)
endif
override CUDA_HOME := /nonexistent
endif
NVCC ?= $(wildcard $(CUDA_HOME)/bin/nvcc)
TOOLKIT := $(patsubst %/cuda_runtime_api.h,%,$(wildcard $(CUDA_HOME)/include/cuda_runtime_api.h))
GPU = $(if $(NVCC),$(shell nvidia-smi -L 2>/dev/null))
ARCH ?= $(if $(GPU),native,sm_90)

# Errors for gcc 14, and so for all.
ERRORS := implicit-function-declaration implicit-int int-conversion incompatible-pointer-types
WARNINGS := -Wall -Wextra -Wshadow -Wundef -Wstrict-prototypes -Wmissing-prototypes $(ERRORS:%=-Werror=%) \
	$(if $(CI),-Werror)
CFLAGS ?= -O2 -g
ASAN := -O1 -g -fsanitize=address,undefined,float-cast-overflow \
	-fno-sanitize-recover=undefined,float-cast-overflow -fno-omit-frame-pointer
# Copies that the compiler writes out are not seen by ThreadSanitizer.
TSAN := -O1 -g -fsanitize=thread $(addprefix -fno-builtin-,memcpy memmove memset memcmp)
LIBS := -lpthread -lm -ldl
BUNDLED := tests/sim/include
export CC CXX CLANG CLANGXX NVCC CUDA_HOME JOBS
# Numbers have a point, whatever the locale.
export LC_ALL := C

# What to say where a tool is missing, with the Debian package that has it.
need = $(if $(shell command -v $(1)),,$(error $(1) is not found. On Debian: apt install $(2)))
# A step says what it makes; with V=1 how.
step = $(if $(V),,@echo '  $@';)
need_gpu = $(if $(GPU),,$(error this needs a GPU with its driver, and nvcc of CUDA 12.0 or later. On Debian 13, Ubuntu \
	24.04: apt install nvidia-cuda-toolkit. CUDA_HOME=... says where another one is))
folder = @mkdir -p $(@D)
$(call need,$(CC),gcc)

.PHONY: help demo test enumerate soak-oom soak-programs test-sanitize test-mutants test-breaks test-gpu soak-gpu
.PHONY: soak-graphs-gpu check-tags check-compile-all test-bare docs-api docs plots fuzz bench-gpu timeline-gpu
.PHONY: bench-adversaries examples run-examples adapters install uninstall clean
.DELETE_ON_ERROR:
.SECONDARY:

help:
	@echo 'make demo           replay ten real programs through galloc; on the GPU if there is one, else simulated'
	@echo 'make test           all tests; they need no GPU'
	@echo 'make enumerate      all programs of up to 8 operations, and all schedules with few switches; an hour'
	@echo 'make test-sanitize  the tests under ASan and UBSan, those with threads under TSan'
	@echo 'make soak-oom       memory runs out EXHAUST_ROUNDS=1000000 times, under all limits and with calls that fail'
	@echo 'make soak-programs  random programs: streams, graphs, pools, threads, contexts, resets; FUZZ_SECONDS=60 each'
	@echo 'make test-mutants   break galloc.h on purpose and see that the tests notice'
	@echo 'make test-breaks    the same at BREAKS=100 places drawn at random; pip gets what it needs'
	@echo 'make check-tags     only the check of names, sections and form of galloc.h'
	@echo 'make docs-api       write docs/api.md anew from the comments of galloc.h'
	@echo 'make docs           README and docs/ as a site, build/site; links and code are checked; pip gets what it needs'
	@echo 'make plots          draw the charts of docs/ anew from bench/results/; pip gets what it needs'
	@echo 'make check-compile-all  compile galloc.h with each compiler, level, and standard, with all warnings'
	@echo 'make test-bare      demo and test on a machine that has but gcc, libc6-dev, make and gzip; as root'
	@echo 'make fuzz           each fuzzer for FUZZ_SECONDS=60; needs clang, and node for the one of the page'
	@echo 'make test-gpu       tests and examples on a GPU; needs nvcc'
	@echo 'make soak-gpu       SECONDS=480: pages move while every byte is checked, on a GPU; needs nvcc'
	@echo 'make soak-graphs-gpu  the same while graphs are captured, launched and destroyed beside 16 threads'
	@echo 'make bench-gpu      measurements on a GPU; needs nvcc'
	@echo 'make adapters       build/libgalloc_torch.so, _python.so, _preload.so, for examples/; needs the CUDA Toolkit'
	@echo 'make timeline-gpu   memory held over the calls of a trace, beside the peers, in a minute; needs nvcc'
	@echo 'make examples       build/examples/*, on the simulated device; where nvcc is found also *-cuda for a GPU'
	@echo 'make run-examples   builds and runs them; one table and build/examples.svg; on the GPU if there is one'
	@echo 'make build/replay   what traces cost; build/replay --help says how it is called'
	@echo 'make build/hotpath  the host time of an alloc/free pair; build/hotpath --help likewise'
	@echo 'make build/adversary    writes traces that are built to hurt; build/adversary --help likewise'
	@echo 'make bench-adversaries  what those cost; on the simulated device, a few minutes'
	@echo 'make install        PREFIX=/usr/local DESTDIR=: header, licence, pkg-config, CMake, manual page, adaptors'
	@echo 'make uninstall      the same PREFIX and DESTDIR: remove them'
	@echo 'make clean          remove build/'

# ---- the simulated device, and tests on it: for each set of CUDA headers and flags ----------------------------------

SIM := $(wildcard tests/sim/*.c)
SIM_OBJECTS := $(SIM:tests/%.c=build/bundled/%.o)
TESTS := $(basename $(notdir $(wildcard tests/unit/test_*.c tests/stress/test_*.c)))
THREAD_TESTS := $(filter test_threads% test_lifetimes test_stream_cache test_capture test_limits test_torch \
	test_backends test_history test_nvtx test_stacks test_log test_override test_snapshot test_trace,$(TESTS))
ADDRESS_TESTS := $(TESTS)
CHECKS := $(wildcard tests/checks/check_*.sh)

# Programs lie in one folder of build/, whichever folder of tests/ has them: no two of those files have the same name.
vpath %.c tests/unit tests/stress tests/fuzz

# $(1): name, a folder of build/   $(2): folder of the CUDA headers   $(3): flags
# The tests' galloc is compiled once, for speed; the tests are not, but for those with a galloc of their own.
# -rdynamic: their functions have names at run time, for stacks.
OPTIMIZE = -O0
build/%/test_programs: OPTIMIZE = -O1
build/%/enumerate: OPTIMIZE = -O2
# NVTX's headers are the toolkit's only; without them this program skips itself.
build/%/test_nvtx: NVTX = $(TOOLKIT:%=-idirafter %)
# These run with the toolkit's headers as well, under which types and names could differ; the others are only compiled.
TOOLKIT_RUNS := test_api test_backends test_capture test_streams
# They take longest, and so begin first.
LONGEST := build/bundled/enumerate tests/checks/check_compile.sh tests/checks/check_instructions.sh \
	build/bundled/test_moves
define variant
build/$(1)/sim/%.o: tests/sim/%.c
	$$(folder)
	$$(step)$$(CC) -std=c11 $$(WARNINGS) $(3) -MMD -MP -Itests/sim -isystem $(2) -c $$< -o $$@
build/$(1)/inside.o: tests/support/inside.c build/held/galloc.h
	$$(folder)
	$$(step)$$(CC) -std=c11 $$(WARNINGS) $(3) -O1 -MMD -MP -Ibuild/held -Itests/support -Itests/sim -isystem $(2) -c $$< -o $$@
build/$(1)/inside.a: build/$(1)/inside.o
	@rm -f $$@ && $$(AR) rc $$@ $$<
build/$(1)/%: %.c $(SIM:tests/%.c=build/$(1)/%.o) build/$(1)/inside.a
	$$(step)$$(CC) -std=c11 $$(WARNINGS) $(3) $$(OPTIMIZE) -MMD -MP -I. -Itests/support -Itests/sim -isystem $(2) $$(NVTX) \
		$$< $$(filter %.o %.a,$$^) -o $$@ $$(LIBS) -rdynamic
endef
$(eval $(call variant,bundled,$(BUNDLED),$(CFLAGS)))
$(eval $(call variant,toolkit,$(TOOLKIT),$(CFLAGS)))
$(eval $(call variant,asan,$(BUNDLED),$(ASAN)))
$(eval $(call variant,tsan,$(BUNDLED),$(TSAN)))

# galloc.h with checks of the locks that its comments name.
build/held/galloc.h: galloc.h tests/support/held.awk
	$(folder)
	$(step)awk -f tests/support/held.awk $< >$@.new && mv $@.new $@

build/toolkit/%.compiles: %.c galloc.h tests/support/setup.h $(wildcard tests/support/inside.*)
	$(folder)
	$(step)$(CC) -std=c11 $(WARNINGS) -fsyntax-only -I. -Itests/support -Itests/sim -isystem $(TOOLKIT) $< && touch $@

# Without a compiler of C++ the examples in C remain. galloc is compiled once for all of them.
EXAMPLES := $(addprefix build/,$(basename $(wildcard examples/*.c $(if $(shell command -v $(CXX)),examples/*.cu examples/*.cpp))))

build/examples/galloc.o: galloc.h
	$(folder)
	$(step)echo '#include "galloc.h"' | $(CC) -DGALLOC_IMPLEMENTATION -I. -isystem $(BUNDLED) -x c -c - -o $@
# As programs to read, not to measure: most of the time is the compiler's.
build/examples/%: examples/%.c examples/example.h build/examples/galloc.o $(SIM_OBJECTS)
	$(step)$(CC) $(WARNINGS) $(CFLAGS) -O0 -DGALLOC_IMPLEMENTATION_DONE -I. -isystem $(BUNDLED) $(filter %.c %.o,$^) \
		-o $@ $(LIBS)
EXAMPLE_CXX = -Wall -Wextra -Wshadow $(if $(CI),-Werror) $(CFLAGS) -O1 -DGALLOC_IMPLEMENTATION_DONE -I.
build/examples/%: examples/%.cpp examples/cpp/galloc.hpp examples/example.h build/examples/galloc.o $(SIM_OBJECTS)
	$(step)$(CXX) -std=c++11 $(EXAMPLE_CXX) -isystem $(BUNDLED) $(filter %.cpp %.o,$^) -o $@ $(LIBS)
build/examples/%: examples/%.cu examples/example.h build/examples/galloc.o $(SIM_OBJECTS) tests/sim/sim_cuda.h \
		tests/sim/nvcc.sh
	$(step)SIM_OBJECTS='$(SIM_OBJECTS)' tests/sim/nvcc.sh $(EXAMPLE_CXX) $(filter %.cu %galloc.o,$^) -o $@

test: | build/hotpath
test: build/replay build/adversary build/bundled/enumerate $(TESTS:%=build/bundled/%) \
		$(if $(TOOLKIT),$(TOOLKIT_RUNS:%=build/toolkit/%)) $(EXAMPLES) \
		| $(if $(TOOLKIT),$(patsubst %,build/toolkit/%.compiles,$(filter-out $(TOOLKIT_RUNS),$(TESTS))))
	@tests/support/run_programs.sh $(LONGEST) $(filter-out $(LONGEST) build/replay build/adversary,$(CHECKS) $^)

enumerate: build/bundled/enumerate
	@ENUMERATOR=$< tests/stress/enumerate.sh $(PARTS)

soak-oom: build/bundled/test_exhaust
	@EXHAUST_ROUNDS=$(or $(EXHAUST_ROUNDS),1000000) $<

soak-programs: build/bundled/test_programs build/bundled/test_worlds build/bundled/test_growth
	@for program in $^; do FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_FROM=$(or $(FUZZ_FROM),$(shell date +%s)) $$program \
		|| exit 1; done

check-compile-all: $(if $(NVCC),build/replay-cuda build/hotpath-cuda)
	@GRID=1 tests/checks/check_compile.sh
	@GRID=1 tests/checks/check_variants.sh
	@GRID=1 tests/checks/check_stacks.sh

test-bare:
	@tests/checks/bare_machine.sh

test-sanitize: $(ADDRESS_TESTS:%=build/asan/%) $(THREAD_TESTS:%=build/tsan/%)
	@tests/support/run_programs.sh $^

test-mutants:
	@tests/mutants.sh

build/venv-breaks/ready: tests/requirements.txt
	@docs/venv.sh build/venv-breaks tests/requirements.txt 'make test-breaks'

test-breaks: build/venv-breaks/ready
	@build/venv-breaks/bin/python tests/random_breaks.py $(or $(BREAKS),100) $(SEED)

check-tags:
	@tests/checks/check_names.sh

docs-api:
	@mkdir -p build && docs/api.sh >build/api.md && cp build/api.md docs/api.md

# ---- the site and the charts: the packages of docs/requirements.txt, in a virtual environment ------------------------

VENV := build/venv
$(VENV)/ready: docs/requirements.txt
	@docs/venv.sh $(VENV) docs/requirements.txt 'make docs and make plots'

docs: $(VENV)/ready
	@tests/checks/check_plots.sh
	@tests/checks/check_docs.sh
	@docs/site.sh $(VENV)

plots: $(VENV)/ready
	@$(VENV)/bin/python bench/plots/plots.py

# ---- fuzzing --------------------------------------------------------------------------------------------------------

ENTRY_POINTS := cudaGetDriverEntryPoint cudaGetDriverEntryPointByVersion
FUZZ_SECONDS ?= 60
FUZZERS := $(patsubst tests/fuzz/%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))

define build_fuzzer
	$(call need,$(CLANG),clang)
	@mkdir -p $@.corpus
	$(step)$(CLANG) -std=c11 -w -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
		-I. -Itests/support -Itests/sim -isystem $(BUNDLED) $(filter %.c,$^) -o $@ $(LIBS)
endef
build/fuzz/fuzz_trace: tests/fuzz/fuzz_trace.c bench/trace.c bench/trace.h bench/map.h
	$(build_fuzzer)
build/fuzz/fuzz_snapshot: bench/trace.c bench/trace.h bench/map.h
build/fuzz/%: tests/fuzz/%.c tests/support/inside.c $(SIM) galloc.h $(wildcard tests/fuzz/*.h tests/support/*.h)
	$(build_fuzzer)

# The page's reader of snapshots, where node has what it needs.
build/fuzz/snapshots: tests/checks/snapshots.c galloc.h $(SIM_OBJECTS)
	$(folder)
	$(step)$(CC) -std=c11 $(CFLAGS) -I. -Itests/sim -isystem $(BUNDLED) $(filter %.c %.o,$^) -o $@ $(LIBS)

build/fuzz/replay: $(patsubst %,bench/%.c,replay allocator cli calls crew run trace advice whatif whatif_chart device_sim) \
		$(SIM) $(wildcard bench/*.h) galloc.h
	$(folder)
	$(step)$(CC) -std=c11 -w $(ASAN) -I. -Itests/sim -isystem $(BUNDLED) $(filter %.c,$^) -o $@ \
		$(ENTRY_POINTS:%=-Wl,--wrap=%) $(LIBS)

fuzz: $(FUZZERS) build/fuzz/snapshots build/fuzz/replay
	@for fuzzer in $(FUZZERS); do echo "$$fuzzer, $(FUZZ_SECONDS) s"; \
		$$fuzzer -max_total_time=$(FUZZ_SECONDS) -len_control=1 -max_len=1024 -print_final_stats=1 -verbosity=0 \
			-artifact_prefix=$$fuzzer. $$fuzzer.corpus || exit 1; done
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tests/fuzz/fuzz_replay.sh
	@FUZZ_SECONDS=$(FUZZ_SECONDS) tests/fuzz/fuzz_viewer.sh

# ---- measuring: PROGRAM on the simulated device, and PROGRAM-cuda beside it where nvcc is found ---------------------

HOTPATH := allocator cli
REPLAY := $(HOTPATH) calls crew run trace
WHATIF := advice whatif whatif_chart
WRAPPED := cudaMalloc cudaFree $(ENTRY_POINTS)
PAIRS := pairs floor
PEERS := peer_async peer_cub
bench_objects = $(patsubst %,build/$(1)/%.o,$(2))

build/bench/%.o: bench/%.c
	$(folder)
	$(step)$(CC) -std=c11 $(WARNINGS) $(CFLAGS) -MMD -MP -I. -Itests/sim -isystem $(BUNDLED) -c $< -o $@
build/bench-cuda/%.o: bench/%.c
	$(folder)
	$(step)$(CC) -std=c11 $(WARNINGS) $(CFLAGS) -MMD -MP -I. -isystem $(TOOLKIT) -DBENCH_PEERS -c $< -o $@
build/bench-cuda/%.o: bench/%.cu bench/device.h bench/allocator.h galloc.h
	$(folder)
	$(step)$(NVCC) -O2 -arch=$(ARCH) -I. -c $< -o $@
.PHONY: always
# The report says what was built, or why nothing was: then the next `make` tries again.
build/bench-cuda/peer_torch.txt: bench/peer_torch.sh bench/peer_torch.cpp bench/allocator.h \
		$(if $(shell grep '^not built' build/bench-cuda/peer_torch.txt 2>/dev/null),always)
	@TOOLKIT=$(TOOLKIT) bench/peer_torch.sh $(@:.txt=.so)

build/replay: $(call bench_objects,bench,$(WHATIF))
build/replay-cuda: $(call bench_objects,bench-cuda,$(WHATIF))
build/replay build/demo: build/%: build/bench/%.o $(call bench_objects,bench,$(REPLAY) device_sim) $(SIM_OBJECTS)
	$(step)$(CC) $^ -o $@ $(ENTRY_POINTS:%=-Wl,--wrap=%) $(LIBS)
build/adversary: build/bench/adversary.o
	$(step)$(CC) $^ -o $@
build/hotpath: $(call bench_objects,bench,hotpath $(HOTPATH) $(PAIRS) device_sim) $(SIM_OBJECTS)
	$(step)$(CC) $^ -o $@ $(LIBS)
build/replay-cuda build/demo-cuda: build/%-cuda: build/bench-cuda/%.o \
		$(call bench_objects,bench-cuda,$(REPLAY) $(PEERS) device_cuda account_cuda)
	$(step)$(NVCC) $^ -o $@ $(WRAPPED:%=-Xlinker --wrap=%) $(LIBS)
build/hotpath-cuda: $(call bench_objects,bench-cuda,hotpath $(HOTPATH) $(PAIRS) $(PEERS) device_cuda)
	$(step)$(NVCC) $^ -o $@ $(LIBS)
build/replay-cuda build/hotpath-cuda build/demo-cuda: | build/bench-cuda/peer_torch.txt
# `make test` measures nothing: it only sees that the files for a GPU compile, and check-compile-all builds them.
build/replay build/hotpath: build/%: | $(if $(NVCC),$(if $(filter test,$(MAKECMDGOALS)),,build/%-cuda))
build/toolkit/bench/%.compiles: bench/%.c galloc.h $(wildcard bench/*.h)
	$(folder)
	$(step)$(CC) -std=c11 $(WARNINGS) -fsyntax-only -I. -isystem $(TOOLKIT) -DBENCH_PEERS $< && touch $@
test: | $(if $(TOOLKIT),$(patsubst %,build/toolkit/bench/%.compiles,hotpath $(REPLAY) $(WHATIF) $(PAIRS) replay demo peer_async \
	account_cuda))

demo: build/demo $(if $(GPU),build/demo-cuda)
	@build/demo $(if $(GPU),--backend cuda) --measured bench/results/nvidia-h200-x2-summary.txt --svg build/demo.svg bench/traces/*.gz

bench-adversaries: build/replay build/adversary
	+@bench/adversaries.sh

# ---- on a GPU -------------------------------------------------------------------------------------------------------

GPU_EXAMPLES := $(patsubst examples/%,build/examples/%-cuda,$(basename $(wildcard examples/*.c examples/*.cu examples/*.cpp)))
build_gpu = $(NVCC) -O2 $(if $(filter %.cu,$<),-arch=$(ARCH)) -I. $< -o $@ $(LIBS)

build/examples/%-cuda: examples/%.c examples/example.h galloc.h
	$(folder)
	$(step)$(build_gpu)
build/examples/%-cuda: examples/%.cpp examples/cpp/galloc.hpp examples/example.h galloc.h
	$(folder)
	$(step)$(build_gpu)
build/examples/%-cuda: examples/%.cu examples/example.h galloc.h
	$(folder)
	$(step)$(build_gpu)

examples: $(EXAMPLES) $(if $(NVCC),$(GPU_EXAMPLES))

run-examples: $(if $(GPU),$(GPU_EXAMPLES),$(EXAMPLES))
	@bench/examples.sh $(sort $^)

# ---- install ---------------------------------------------------------------------------------------------------------

PREFIX ?= /usr/local
TO = $(DESTDIR)$(PREFIX)
VERSION := $(shell sed -n 's/^\#define GALLOC_VERSION_STRING "\(.*\)"/\1/p' galloc.h)
ADAPTORS := pytorch python preload
adaptor_files = $(filter %.c %.cpp %.py %.md,$(wildcard examples/$(1)/*)) # not what Python or the user put there
adaptor_library = build/libgalloc_$(patsubst pytorch,torch,$(1)).so
# galloc.pc has the path, which therefore must not depend on the folder of the caller.
need_prefix = $(if $(filter-out /%,$(firstword $(PREFIX))),$(error PREFIX=$(PREFIX) is not an absolute path))
filled = sed 's|@PREFIX@|$(subst |,\|,$(subst &,\&,$(PREFIX)))|; s|@VERSION@|$(VERSION)|'

# The adaptors' libraries are installed where `make adapters` has made them.
install:
	$(need_prefix)
	@install -d "$(TO)/include" "$(TO)/share/pkgconfig" "$(TO)/share/cmake/galloc" "$(TO)/share/man/man3" \
		"$(TO)/share/doc/galloc" $(ADAPTORS:%="$(TO)/share/galloc/%")
	@install -m 644 galloc.h examples/cpp/galloc.hpp "$(TO)/include"
	@install -m 644 LICENSE "$(TO)/share/doc/galloc/LICENSE"
	@install -m 644 cmake/gallocConfig.cmake "$(TO)/share/cmake/galloc/gallocConfig.cmake"
	@$(foreach name,$(ADAPTORS),install -m 644 $(call adaptor_files,$(name)) "$(TO)/share/galloc/$(name)" &&) :
	@for name in $(ADAPTORS); do sed -i -e 's|\[\([^]]*\)\](\.\./\.\./\([^)]*\))|\1 (\2)|g' \
		-e 's|\[\([^]]*\)\](\.\./\(cpp/[^)]*\))|\1 (examples/\2)|g' "$(TO)/share/galloc/$$name/README.md" || exit 1; done
	@$(filled) cmake/gallocConfigVersion.cmake.in >"$(TO)/share/cmake/galloc/gallocConfigVersion.cmake"
	@$(filled) cmake/galloc.pc.in >"$(TO)/share/pkgconfig/galloc.pc"
	@docs/man.sh >"$(TO)/share/man/man3/galloc.3"
	@chmod 644 "$(TO)/share/cmake/galloc/gallocConfigVersion.cmake" "$(TO)/share/pkgconfig/galloc.pc" \
		"$(TO)/share/man/man3/galloc.3"
	@$(foreach name,$(ADAPTORS),[ ! -e $(call adaptor_library,$(name)) ] || \
		install -m 755 $(call adaptor_library,$(name)) "$(TO)/share/galloc/$(name)" || exit 1;) :
	@echo 'galloc $(VERSION) is in $(TO)'

uninstall:
	$(need_prefix)
	@rm -f "$(TO)/include/galloc.h" "$(TO)/include/galloc.hpp" "$(TO)/share/pkgconfig/galloc.pc" \
		"$(TO)/share/man/man3/galloc.3" "$(TO)/share/cmake/galloc/gallocConfig.cmake" \
		"$(TO)/share/cmake/galloc/gallocConfigVersion.cmake" "$(TO)/share/doc/galloc/LICENSE"
	@rm -rf "$(TO)/share/galloc"
	@rmdir "$(TO)/share/cmake/galloc" "$(TO)/share/doc/galloc" 2>/dev/null || :
	@echo 'galloc is removed from $(TO): header, adaptors, pkg-config and CMake files, manual page, licence'

# ---- adaptors: galloc where a program expects another allocator ------------------------------------------------------

CUDART = $(firstword $(wildcard $(CUDA_HOME)/lib64/libcudart.so $(CUDA_HOME)/lib/libcudart.so))
need_toolkit = $(if $(TOOLKIT),,$(error this needs the CUDA Toolkit 12.0 or later. CUDA_HOME=... says where it is))

adapters: build/libgalloc_torch.so build/libgalloc_python.so build/libgalloc_preload.so

# CUDA's runtime is inside: Python's packages bring theirs under other names.
build/libgalloc_python.so: examples/python/galloc_python.c galloc.h
	$(need_toolkit)
	$(folder)
	$(step)$(CC) -std=gnu11 $(WARNINGS) -O2 -fPIC -shared -Wno-missing-prototypes -I. -isystem $(TOOLKIT) $< -o $@ \
		$(if $(CUDART),-L$(dir $(CUDART))) -lcudart_static -Wl,--exclude-libs,ALL $(LIBS) -lrt

# It needs the toolkit's headers, but no library of CUDA.
build/libgalloc_preload.so: examples/preload/galloc_preload.c galloc.h
	$(need_toolkit)
	$(folder)
	$(step)$(CC) -std=gnu11 $(WARNINGS) -O2 -fPIC -shared -fvisibility=hidden -Wl,-z,defs -I. -isystem $(TOOLKIT) $< \
		-o $@ $(LIBS)

build/libgalloc_torch.so: examples/pytorch/galloc_torch.c galloc.h
	$(need_toolkit)
	$(folder)
	$(step)$(CC) -std=gnu11 $(WARNINGS) -O2 -fPIC -shared -fexceptions -fvisibility=hidden -Wno-missing-prototypes -I. \
		-isystem $(TOOLKIT) $< \
		-o $@ $(if $(CUDART),-L$(dir $(CUDART))) -lcudart $(LIBS)

test-gpu:
	$(need_gpu)
	@tests/gpu/run.sh

timeline-gpu: build/replay-cuda
	$(need_gpu)
	@bench/timeline.sh

soak-gpu:
	$(need_gpu)
	@SOAK_SECONDS=$(or $(SECONDS),480) tests/gpu/soak.sh

soak-graphs-gpu:
	$(need_gpu)
	@ONLY=gpu_graphs GRAPHS_SECONDS=$(or $(SECONDS),480) tests/gpu/run.sh

bench-gpu:
	$(need_gpu)
	+@bench/gpu.sh

clean:
	rm -rf build

-include $(wildcard build/*/*.d build/*/sim/*.d)
