#!/usr/bin/env bash
# Builds everything and runs the tests. The last line is "N passed, N failed, N skipped"; the exit status is 0 when nothing failed.
#
#   tests/run.sh [--full] [SUITE...]
#
# Suites, in this order (default: all but the slow ones, which --full adds):
#   includes  who may include whom
#   readme    its options are those of the program
#   noserver  -Dserver=disabled builds, and its tools work
#   unit      meson test
#   golden    independent outputs, read from $KVASIR_SHARED
#   api       the daemon with real clients
#   deploy    what deploy/ holds: balancers, unit, manifests, dashboard (--full: also the image, and a bare Debian)
#   soak      1,000 requests (--full: 30 minutes of them) with random cancels and failed allocations leave nothing behind
#   sanitize  unit and API tests under ASan and UBSan; with --full a million random operations on the KV cache
#   clang     clang builds it all, warnings are errors
#   cuda      the kernels for every GPU by nvcc, with gates on what it made of them; the API on the emulated GPU, and while it fails
#             (--full: at every call of the CUDA runtime)
#   fuzz      each parser for a minute
#   tsan      unit and API tests under TSan (slow)
#   clients   clients from PyPI as published, the chat page in Chromium, load (slow)
#
# KVASIR_TEST_MODEL names the model file (else it is fetched into .cache/), KVASIR_SHARED the folder of golden files
# (default: ../shared beside the repository), KVASIR_JOBS how many compilers and tests run at once.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

everyday=(includes readme noserver unit golden api deploy soak sanitize clang cuda fuzz)
slow=(tsan clients)
full=no
suites=()
for arg in "$@"; do
	case $arg in
	--full) full=yes ;;
	-h | --help) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
	*)
		if [[ " ${everyday[*]} ${slow[*]} " != *" $arg "* ]]; then
			echo "tests/run.sh: there is no suite \"$arg\"; suites: ${everyday[*]} ${slow[*]}" >&2
			exit 2
		fi
		suites+=("$arg")
		;;
	esac
done
if [ ${#suites[@]} -eq 0 ]; then
	suites=("${everyday[@]}")
	[ "$full" = no ] || suites+=("${slow[@]}")
fi

jobs=${KVASIR_JOBS:-$(nproc)}
cache=$PWD/.cache
logs=$cache/test-logs
mkdir -p "$logs"
export KVASIR_SHARED=${KVASIR_SHARED:-$(cd .. && pwd)/shared}

passed=0
failed=0
skipped=0
tally() { passed=$((passed + $1)); failed=$((failed + $2)); skipped=$((skipped + $3)); }
heading() { printf '\n==== %s (%(%H:%M:%S)T)\n' "$1" -1; }
skip() { echo "SKIP $1: $2"; tally 0 0 1; }

# Runs a command as test NAME: one pass or one failure, with the end of its output when it fails.
check() {
	local name=$1
	shift
	if "$@" >"$logs/$name.log" 2>&1; then
		echo "ok $name"
		tally 1 0 0
	else
		echo "FAIL $name"
		tail -n 40 "$logs/$name.log"
		tally 0 1 0
		return 1
	fi
}

# Runs a command that ends with "N passed, N failed[, N skipped]" and adds that up. One that dies before is a failure.
summed() {
	local name=$1 status counts p f s
	shift
	"$@" 2>&1 | tee "$logs/$name.log"
	status=${PIPESTATUS[0]}
	counts=$(grep -E '^[0-9]+ passed, [0-9]+ failed' "$logs/$name.log" | tail -n 1 | tr -dc '0-9 ')
	read -r p f s <<<"$counts"
	s=${s:-$(grep -cE '^(skipped:|SKIP )' "$logs/$name.log")}
	if [ -z "$counts" ] || { [ "$status" -ne 0 ] && [ "${f:-0}" -eq 0 ]; }; then
		echo "FAIL $name: ended with status $status"
		tally "${p:-0}" 1 "$s"
	else
		tally "$p" "$f" "$s"
	fi
}

# build DIR [MESON OPTIONS]: sets the directory up once, then builds.
build() {
	local dir=$1
	shift
	if [ ! -f "$dir/build.ninja" ]; then
		check "setup-$(basename "$dir")" meson setup -Dwerror=true -Dcuda=disabled "$@" "$dir" || return 1
	fi
	check "build-$(basename "$dir")" ninja -j "$jobs" -C "$dir"
}

# The unit tests of a build; one count per test program.
unit_tests() {
	local name=$1 dir=$2 log
	log=$logs/$name.log
	meson test -C "$dir" --suite unit --num-processes "$jobs" --print-errorlogs --timeout-multiplier "${3:-1}" >"$log" 2>&1
	grep -E ' (FAIL|TIMEOUT|ERROR) ' "$log" | sed -E 's/^ *[0-9]+\/[0-9]+ +/FAIL /'
	number() { sed -nE "s/^$1: *([0-9]+).*/\1/p" "$log" | tail -n 1; }
	local ok fail timeout skip
	ok=$(number Ok) fail=$(number Fail) timeout=$(number Timeout) skip=$(number Skipped)
	if [ -z "$ok" ]; then
		echo "FAIL $name: meson test did not finish"
		tail -n 20 "$log"
		tally 0 1 0
		return
	fi
	if [ "$((fail + timeout))" -gt 0 ]; then
		sed -n '/=====/,$p' "$log" | head -n 120
	fi
	tally "$ok" "$((fail + timeout))" "$skip"
	echo "$name: $ok test programs passed, $((fail + timeout)) failed, $skip skipped"
}

# The Python clients of the tests: the requirements of each file, installed once.
venv() {
	local file stamp
	for file in "$@"; do
		stamp=$cache/venv/${file//\//-}
		cmp -s "$file" "$stamp" && continue
		echo "installing the packages of $file into .cache/venv"
		[ -x "$cache/venv/bin/pip" ] || python3 -m venv "$cache/venv" || return
		"$cache/venv/bin/pip" install -q -r "$file" && cp "$file" "$stamp" || return
	done
}

need_python() { # NAME [MORE REQUIREMENTS]
	local name=$1
	shift
	venv tests/requirements.txt "$@" >"$logs/venv.log" 2>&1 && return 0
	skip "$name" "the Python packages of tests/requirements.txt $* cannot be had (see $logs/venv.log)"
	return 1
}

# The model: named, or fetched. Without one every test that needs it skips with that reason.
model() {
	[ -z "${KVASIR_TEST_MODEL:-}" ] || return 0
	KVASIR_TEST_MODEL=$(python3 tests/tools/fetch_models.py "$cache/models" 2>"$logs/model.log")
	export KVASIR_TEST_MODEL
	[ -n "$KVASIR_TEST_MODEL" ] || echo "no model: tests/tools/fetch_models.py failed (see $logs/model.log)"
}

api_tests() { # NAME BUILD
	need_python "$1" || return
	KVASIR_BIN=$PWD/$2/server/kvasir summed "$1" "$cache/venv/bin/python" -m pytest -q -rfEs --tb=short -p no:cacheprovider \
		--color=no --durations=5 tests/api
}

suite_includes() { summed includes tests/check_includes.sh; }

suite_readme() { build build >/dev/null && check readme tests/check_readme.sh build/server/kvasir; }

suite_noserver() {
	build build-noserver -Dserver=disabled -Dtests=disabled || return
	check noserver-version build-noserver/server/kvasir version
	if ldd build-noserver/server/kvasir | grep -E 'libuv|libmicrohttpd|libwebsockets'; then
		echo "FAIL noserver-libraries: the program needs a network library"
		tally 0 1 0
	else
		tally 1 0 0
	fi
	if [ -n "$KVASIR_TEST_MODEL" ]; then
		check noserver-inspect build-noserver/server/kvasir inspect "$KVASIR_TEST_MODEL"
		check noserver-generate build-noserver/server/kvasir generate --model "$KVASIR_TEST_MODEL" --prompt Hello --max-tokens 4
		check noserver-bench build-noserver/server/kvasir bench --model "$KVASIR_TEST_MODEL" --prefill 16 --decode 2 --runs 1
	else
		skip noserver-generate "no model"
	fi
}

suite_unit() { build build && unit_tests unit build; }

suite_golden() {
	local f name
	local -A tool=([test_tokenizer]=tokenize-tool [test_templates]=render-tool [test_jinja_diff]=render-tool)
	build build >/dev/null || return
	if [ ! -d "$KVASIR_SHARED/golden" ]; then
		skip golden "$KVASIR_SHARED/golden is not there (set KVASIR_SHARED)"
		return
	fi
	need_python golden || return
	for f in tests/golden/test_*.py; do
		[ -e "$f" ] || { skip golden "there are none"; return; }
		name=$(basename "$f" .py)
		KVASIR_FULL=$full KVASIR_BUILD=$PWD/build KVASIR_BIN=$PWD/build/server/kvasir \
			summed "golden-${name#test_}" "$cache/venv/bin/python" "$f" ${tool[$name]:+"build/tests/golden/${tool[$name]}"}
	done
}

suite_api() { build build && api_tests api build; }

suite_deploy() {
	build build || return
	need_python deploy tests/deploy/requirements.txt || return
	KVASIR_FULL=$full KVASIR_BIN=$PWD/build/server/kvasir summed deploy "$cache/venv/bin/python" -m pytest -q -rfEs --tb=short \
		-p no:cacheprovider --color=no --durations=5 tests/deploy
}

suite_soak() {
	build build || return
	need_python soak || return
	local how=(--requests 1000)
	[ "$full" = no ] || how=(--minutes 30)
	KVASIR_BIN=$PWD/build/server/kvasir summed soak "$cache/venv/bin/python" tests/api/soak.py "${how[@]}"
	[ "$full" = no ] || KVASIR_FULL=yes KVASIR_BIN=$PWD/build/server/kvasir summed faults "$cache/venv/bin/python" -m pytest -q -rfEs \
		--tb=short -p no:cacheprovider --color=no tests/api/test_faults.py
}

# The KV rooms and a whole engine, at a million operations (--full); the unit tests do a tenth.
long_soak() { # NAME BUILD
	[ "$full" = yes ] || return 0
	local t
	for t in engine-soak engine-engine_soak; do
		KVASIR_SOAK_OPS=1000000 check "$1-$t" timeout 1800 "$2/tests/unit/test-$t" && grep -h operations "$logs/$1-$t.log"
	done
}

suite_sanitize() {
	build build-asan -Dbuildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false || return
	export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
	unit_tests sanitize-unit build-asan 4
	long_soak sanitize build-asan
	KVASIR_TEST_SLOW=6 api_tests sanitize-api build-asan
	unset ASAN_OPTIONS UBSAN_OPTIONS
}

suite_tsan() {
	build build-tsan -Dbuildtype=debugoptimized -Db_sanitize=thread -Db_lundef=false || return
	export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
	unit_tests tsan-unit build-tsan 8
	long_soak tsan build-tsan
	KVASIR_TEST_SLOW=12 api_tests tsan-api build-tsan
	unset TSAN_OPTIONS
}

# Everything here skips by itself what it cannot have: a package, a Chromium, enough descriptors.
suite_clients() {
	build build || return
	local dir=$cache/venv-clients stamp=$cache/venv-clients/requirements-full.txt
	if ! cmp -s tests/requirements-full.txt "$stamp"; then
		echo "making the environment of clients in .cache/venv-clients"
		if ! { python3 -m venv "$dir" && "$dir/bin/pip" install -q -r tests/requirements-full.txt; } >"$logs/venv-clients.log" 2>&1; then
			skip clients "the packages of tests/requirements-full.txt cannot be had (see $logs/venv-clients.log)"
			return
		fi
		cp tests/requirements-full.txt "$stamp"
	fi
	KVASIR_FULL=yes KVASIR_BIN=$PWD/build/server/kvasir summed clients "$dir/bin/python" -m pytest -q -rfEs --tb=short \
		-p no:cacheprovider --color=no tests/api/test_clients.py tests/api/test_page.py tests/api/test_metrics.py tests/api/test_load.py
}

need_clang() {
	command -v clang >/dev/null && return 0
	skip "$1" "clang is not installed"
	return 1
}

suite_clang() {
	need_clang clang || return
	CC=clang CXX=clang++ build build-clang && unit_tests clang-unit build-clang
}

# What nvcc compiles runs on no GPU here, and must say so; what runs here is the same source on the CPU. Without nvcc only that.
suite_cuda() {
	local nvcc flags model=$cache/models/random-cuda.gguf
	nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
	if [ -x "$nvcc" ]; then
		# As the image's build stage does it.
		read -ra flags <<<"$(sed -nE '/ AS build-cuda$/,/^FROM/s/^RUN meson setup (.*) \/build \/src && .*/\1/p' Dockerfile)"
		if [ ${#flags[@]} -gt 0 ] && build build-cuda "${flags[@]}"; then
			need_cuobjdump
			summed cuda-resources python3 tests/cuda/check_resources.py build-cuda/cuda/*.resources
			summed cuda-sass python3 tests/cuda/check_sass.py "${KVASIR_CUOBJDUMP:-cuobjdump}" build-cuda/cuda/product.o \
				build-cuda/cuda/attention{,_int8,_fp8}.o
			check cuda-dockerfile runs_in_the_image build-cuda/server/kvasir
			check cuda-no-gpu no_gpu build-cuda/server/kvasir
			check cuda-without-meson tests/gpu/build.sh build-gpu-sh 90a "$jobs"
		fi
	else
		skip cuda-nvcc "nvcc is not installed"
	fi
	build build || return
	if [ ! -e build/cuda/libkvasir-cuda-host.a ]; then
		skip cuda-api "this build has no device cuda-host (no C++ compiler)"
		return
	fi
	need_python cuda-api || return
	mkdir -p "$cache/models"
	check cuda-model "$cache/venv/bin/python" tests/tools/make_model.py "$model" --type Q4_K --layers 1 --embd 256 --ff 256 --heads 4 \
		--kv-heads 2 --ctx 8192 --chat-template chatml --tied || return
	check cuda-check-sh tests/gpu/check.sh --build build --device cuda-host --small
	check cuda-check-sh-stops stops_at_what_is_wrong
	KVASIR_TEST_MODEL=$model KVASIR_TEST_DEVICE=cuda-host KVASIR_TEST_SLOW=6 KVASIR_BIN=$PWD/build/server/kvasir summed cuda-api \
		"$cache/venv/bin/python" -m pytest -q -rfEs --tb=short -p no:cacheprovider --color=no --durations=5 -m "not trained" \
		tests/api/test_{openai,device,errors,kv,kv_dtype,quirks,sessions,websocket}.py
	[ "$full" = no ] || KVASIR_CUDA_SWEEP=1 check cuda-every-failure build/tests/unit/test-cuda-failures
}

# A device that fails in the middle of the comparison: the check ends there, and its table has what went well.
stops_at_what_is_wrong() {
	local said
	said=$(KVASIR_HOST_CUDA_FAIL=launch:200:cudaErrorLaunchFailure tests/gpu/check.sh --build build --device cuda-host --small) && return 1
	echo "$said"
	sed -n '/^==== what is known/,$p' <<<"$said" | grep -q '^rms_norm .* ok$' && tail -n 1 <<<"$said" | grep -q 'WRONG (status 1)$'
}

# On a machine without a GPU a build with CUDA starts, and --device cuda is one line and a status. With one, it is something else to test.
no_gpu() {
	local said
	! command -v nvidia-smi >/dev/null || return 0
	said=$("$1" generate --model "${KVASIR_TEST_MODEL:-none}" --device cuda --prompt x 2>&1) && return 1
	echo "$said"
	[ "$(wc -l <<<"$said")" -eq 1 ] && grep -q CUDA <<<"$said"
}

# The program needs no library but libc's and those whose packages the Dockerfile's cuda stage has. (What only this machine has is left out.)
runs_in_the_image() {
	local packages library bad=0
	packages=$(sed -n '/ AS cuda$/,/^FROM/p' Dockerfile | grep -oE '\blib[a-z]+[a-z0-9-]*')
	for library in $(readelf -d "$1" | sed -nE 's/.*NEEDED.*\[lib([a-z0-9+_-]+)\.so.*/\1/p'); do
		case $library in
		c | m | dl | rt | pthread | stdc++ | gcc_s | hiredis) ;;
		crypto) library=ssl ;&
		*) grep -qE "^lib$library[0-9]" <<<"$packages" || { echo "lib$library is in no package of the image"; bad=1; } ;;
		esac
	done
	return $bad
}

# NVIDIA's disassembler, which not every toolkit has, from the Python package index. Without it the test of the machine code skips.
need_cuobjdump() {
	local dir=$cache/cuobjdump
	! command -v cuobjdump >/dev/null || return 0
	[ -d "$dir" ] || python3 -m pip install -q --target "$dir" nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm >"$logs/cuobjdump.log" 2>&1
	KVASIR_CUOBJDUMP=$(find "$dir" -name cuobjdump -type f 2>/dev/null | head -n 1)
	export KVASIR_CUOBJDUMP
}

suite_fuzz() {
	need_clang fuzz || return
	local seconds=60
	[ "$full" = no ] || seconds=600
	KVASIR_JOBS=$jobs summed fuzz tests/fuzz/run.sh "$seconds"
}

model
export KVASIR_TEST_MODEL=${KVASIR_TEST_MODEL:-}
start=$SECONDS
for suite in "${suites[@]}"; do
	before=$SECONDS
	heading "$suite"
	"suite_$suite"
	echo "$suite took $((SECONDS - before)) s"
done
printf '\nall took %d s; logs are in %s\n' $((SECONDS - start)) "$logs"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
