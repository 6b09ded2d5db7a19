#!/usr/bin/env bash
# Builds everything and runs the tests. The last line is "N passed, N failed, N skipped"; the exit status is 0 when nothing failed.
#
#   tests/run.sh [--full] [SUITE...]
#
# Suites, in this order (default: all but the slow ones, which --full adds):
#   includes  who may include whom, and how long lines may be
#   readme    its options are those of the program
#   noserver  -Dserver=disabled builds, and its tools work
#   unit      meson test
#   golden    independent outputs, read from $KVASIR_SHARED
#   api       the daemon with real clients
#   deploy    what deploy/ holds: balancers, unit, manifests, dashboard (--full: also the image, and a bare Debian)
#   soak      1,000 requests (--full: 30 minutes of them) with random cancels and failed allocations leave nothing behind
#   sanitize  unit tests under ASan and UBSan, and the API tests of what parses, moves and frees memory (--full: all of them, the emulated
#             GPU's as well, and a million random operations on the KV cache)
#   clang     clang builds it all, warnings are errors (--full: optimised, and its unit tests)
#   cuda      the kernels by nvcc for one GPU, with gates on what it made of them, and for the oldest without optimising (--full: as they
#             are, for all GPUs); the API on the emulated GPU, and while it fails (--full: at every call of the CUDA runtime; and all of
#             tests/gpu/check.sh)
#   avx512    where the machine has no AVX-512 with BF16: its backends over emulated instructions, and AMX's, against the reference
#             (--full: all tests of the CPU backends)
#   aarch64   what is built for 64-bit ARM, under QEMU: the CPU backends against the reference, and a tiny model against NumPy
#             (--full: all tests of the CPU backends)
#   fuzz      each parser for 5 seconds (--full: for 10 minutes)
#   tsan      unit tests, the API and a long run of the engine under TSan (slow: about half an hour)
#   clients   clients from PyPI as published, the chat page in Chromium, load (slow)
#
# KVASIR_TEST_MODEL names the model file (else it is fetched into .cache/), KVASIR_QWEN_MODEL and KVASIR_GEMMA_MODEL two more (fetched with
# --full only), KVASIR_SHARED the folder of golden files
# (default: ../shared beside the repository), KVASIR_JOBS how many compilers and tests run at once. What the suites took, of time and of
# processor time, is said in the end: all of it but the slow ones in some 20 minutes on two cores, and 15 is what it should be.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

everyday=(includes readme noserver unit golden api deploy soak sanitize clang cuda avx512 aarch64 fuzz)
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
# With ccache, builds share what they have in common.
export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=1

passed=0
failed=0
skipped=0
tally() { passed=$((passed + $1)); failed=$((failed + $2)); skipped=$((skipped + $3)); }
heading() { printf '\n==== %s (%(%H:%M:%S)T)\n' "$1" -1; }
# Seconds of processor time that what has run so far took; what still runs in the background is not among them.
processor_s() {
	local stat
	read -ra stat <"/proc/$$/stat"
	echo $(((stat[15] + stat[16]) / $(getconf CLK_TCK)))
}
skip() { echo "SKIP $1: $2"; tally 0 0 1; }
# What failed, with the first lines of standard input that say what of it; said once more in the end, where nobody has to look for it.
failures=''
note_failure() { failures+="$1"$'\n'$(head -n 20 | sed 's/^/    /')$'\n'; }

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
		note_failure "$name" < <(tail -n 10 "$logs/$name.log")
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
		note_failure "$name: status $status" < <(tail -n 10 "$logs/$name.log")
		tally "${p:-0}" 1 "$s"
	else
		[ "$f" -eq 0 ] || note_failure "$name" < <(grep -E '^(FAIL|ERROR|not ok|E  )' "$logs/$name.log")
		tally "$p" "$f" "$s"
	fi
}

# What is built ahead of its suite (build_ahead, below): the process group; '' none.
ahead=''
stop_ahead() {
	[ -n "$ahead" ] || return 0
	kill -- "-$ahead"
	wait "$ahead"
	ahead=''
} 2>/dev/null

# build DIR [MESON OPTIONS]: sets the directory up once, then builds. What has been begun ahead is gone on with at once: at its priority it
# could take for ever on a machine that others use as well.
build() {
	local dir=$1 name lock status=0
	name=$(basename "$dir")
	shift
	exec {lock}>"$logs/$name.lock"
	flock -n "$lock" || { stop_ahead; flock "$lock"; }
	if [ ! -f "$dir/build.ninja" ]; then
		check "setup-$name" meson setup -Dwerror=true -Dcuda=disabled "$@" "$dir" || status=1
	fi
	[ "$status" -ne 0 ] || check "build-$name" ninja -j "$jobs" -C "$dir" || status=1
	exec {lock}>&-
	return "$status"
}

# The builds that suites have for themselves. Everyday ones leave out what is slow to compile and tested elsewhere.
asan="build-asan"
[ "$full" = no ] || asan="build-asan-full"
build_noserver() { build build-noserver -Dserver=disabled -Dtests=disabled; }
build_sanitize() {
	local host_cuda=disabled
	[ "$full" = no ] || host_cuda=auto
	build "$asan" -Dbuildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false -Dhost_cuda=$host_cuda
}
build_tsan() { build build-tsan -Dbuildtype=debugoptimized -Db_sanitize=thread -Db_lundef=false; }
build_clang() {
	if [ "$full" = yes ]; then
		CC=clang CXX=clang++ build build-clang
	else # what clang warns of does not depend on optimisation
		CC=clang CXX=clang++ build build-clang-plain -Dbuildtype=plain -Doptimization=0
	fi
}
build_cuda() {
	local flags
	if [ "$full" = yes ]; then # as the image's build stage does it
		read -ra flags <<<"$(sed -nE '/ AS build-cuda$/,/^FROM/s/^RUN meson setup (.*) \/build \/src && .*/\1/p' Dockerfile)"
		[ ${#flags[@]} -gt 0 ] && build build-cuda "${flags[@]}"
	else # the one with instructions of its own
		build build-cuda-one -Dserver=disabled -Dtests=disabled -Dcuda=enabled -Dgpu_arch=90a
	fi
}
build_fuzz() {
	local lock
	exec {lock}>"$logs/build-fuzz.lock"
	flock -n "$lock" || { stop_ahead; flock "$lock"; }
	tests/fuzz/run.sh --build >"$logs/build-fuzz.log" 2>&1
	exec {lock}>&-
}
find_nvcc() { type -P nvcc || echo /usr/local/cuda/bin/nvcc; }

# build_ahead SUITE...: what they need is built meanwhile, with the processor time that nobody else wants: many tests wait more than they
# compute. Each suite then says how its build went.
build_ahead() {
	set -m # a group of its own, to be ended as a whole
	{
		renice -n 19 "$BASHPID"
		local suite
		for suite; do
			case $suite in
			noserver | sanitize | tsan) "build_$suite" ;;
			clang | fuzz) ! command -v clang || "build_$suite" ;;
			cuda) [ ! -x "$(find_nvcc)" ] || build_cuda ;;
			esac
		done
	} >/dev/null 2>&1 &
	ahead=$!
	set +m
}

# The unit tests of a build, with --full also those that are long; one count per test program.
unit_tests() {
	local name=$1 dir=$2 log suites=(--suite unit)
	[ "$full" = no ] || suites+=(--suite long)
	log=$logs/$name.log
	KVASIR_FULL=$full meson test -C "$dir" "${suites[@]}" --num-processes "$jobs" --print-errorlogs --timeout-multiplier "${3:-1}" >"$log" 2>&1
	grep -E ' (FAIL|TIMEOUT|ERROR) ' "$log" | sed -E 's/^ *[0-9]+\/[0-9]+ +/FAIL /'
	number() { sed -nE "s/^$1: *([0-9]+).*/\1/p" "$log" | tail -n 1; }
	local ok fail timeout skip
	ok=$(number Ok) fail=$(number Fail) timeout=$(number Timeout) skip=$(number Skipped)
	if [ -z "$ok" ]; then
		echo "FAIL $name: meson test did not finish"
		tail -n 20 "$log"
		note_failure "$name" < <(tail -n 10 "$log")
		tally 0 1 0
		return
	fi
	if [ "$((fail + timeout))" -gt 0 ]; then
		note_failure "$name" < <(grep -E ' (FAIL|TIMEOUT|ERROR) |\[  (ERROR|FAILED)  |^Error|error: Failure' "$log" | sort -u)
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

# pytest with the program of a build. Files are shared out to as many workers as there are jobs, each with daemons of its own.
tests_with() { # NAME BUILD ARGUMENTS...
	local name=$1 build=$2
	shift 2
	KVASIR_FULL=${KVASIR_FULL:-no} KVASIR_BIN=$PWD/$build/server/kvasir summed "$name" "$cache/venv/bin/python" -m pytest -q -rfEs --tb=short \
		-p no:cacheprovider --color=no --durations=10 "$@"
}

# Those that compare times have the machine to themselves.
api_tests() { # NAME BUILD FILES...
	need_python "$1" || return
	tests_with "$1" "$2" -n "$jobs" --dist loadfile -m "not alone" "${@:3}"
	! grep -rqF pytest.mark.alone "${@:3}" || tests_with "$1-alone" "$2" -m alone "${@:3}"
}

suite_includes() {
	summed includes tests/check_includes.sh
	summed lines tests/check_lines.sh
}

suite_readme() { build build >/dev/null && check readme tests/check_readme.sh build/server/kvasir; }

suite_noserver() {
	build_noserver || return
	check noserver-version build-noserver/server/kvasir version
	if ldd build-noserver/server/kvasir | grep -E 'libuv|libmicrohttpd|libwebsockets'; then
		echo "FAIL noserver-libraries: the program needs a network library"
		note_failure noserver-libraries <<<"the program needs a network library"
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

suite_api() { build build && api_tests api build tests/api; }

suite_deploy() {
	build build || return
	need_python deploy tests/deploy/requirements.txt || return
	KVASIR_FULL=$full tests_with deploy build tests/deploy
}

suite_soak() {
	build build || return
	need_python soak || return
	local how=(--requests 1000)
	[ "$full" = no ] || how=(--minutes 30)
	KVASIR_BIN=$PWD/build/server/kvasir summed soak "$cache/venv/bin/python" tests/api/soak.py "${how[@]}"
	[ "$full" = no ] || KVASIR_FULL=yes tests_with faults build tests/api/test_faults.py
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
	local files=(tests/api)
	[ "$full" = yes ] || files=(tests/api/test_{cancel,errors,faults,tools,transfer,transport,transport_ws,websocket}.py)
	build_sanitize || return
	export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
	unit_tests sanitize-unit "$asan" 4
	long_soak sanitize "$asan"
	KVASIR_TEST_SLOW=6 api_tests sanitize-api "$asan" "${files[@]}"
	unset ASAN_OPTIONS UBSAN_OPTIONS
}

# What threads do to each other: the unit tests as they are every day, a whole engine at a million operations, and the API with a model of
# hardly any weights, whose steps are short. Tests that compare times, and those that count on words, would tell nothing.
suite_tsan() {
	local full=no model=$cache/models/random-tsan.gguf vocabulary=()
	build_tsan || return
	export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
	unit_tests tsan-unit build-tsan 8
	KVASIR_SOAK_OPS=1000000 check tsan-engine-soak timeout 1800 build-tsan/tests/unit/test-engine-engine_soak
	[ -z "$KVASIR_TEST_MODEL" ] || vocabulary=(--vocab-from "$KVASIR_TEST_MODEL")
	if need_python tsan-api && mkdir -p "$cache/models" && check tsan-model "$cache/venv/bin/python" tests/tools/make_model.py \
		--preset smollm2-kv "${vocabulary[@]}" "$model"; then
		KVASIR_TEST_MODEL=$model KVASIR_TEST_SLOW=8 tests_with tsan-api build-tsan -n "$jobs" --dist loadfile \
			-m "not alone and not trained" tests/api
	fi
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
	# A tracking server of its own, as large as it is; without it its test says so.
	[ -x "$cache/venv-mlflow/bin/mlflow" ] || { python3 -m venv "$cache/venv-mlflow" && "$cache/venv-mlflow/bin/pip" install -q mlflow==3.17.2; } \
		>"$logs/venv-mlflow.log" 2>&1 || echo "mlflow cannot be had (see $logs/venv-mlflow.log)"
	KVASIR_FULL=yes KVASIR_BIN=$PWD/build/server/kvasir summed clients "$dir/bin/python" -m pytest -q -rfEs --tb=short --durations=10 \
		-p no:cacheprovider --color=no tests/api/test_clients.py tests/api/test_page.py tests/api/test_metrics.py tests/api/test_load.py tests/api/test_mlflow.py
}

need_clang() {
	command -v clang >/dev/null && return 0
	skip "$1" "clang is not installed"
	return 1
}

suite_clang() {
	need_clang clang || return
	build_clang || return
	[ "$full" = no ] || unit_tests clang-unit build-clang
}

# What nvcc compiles runs on no GPU here, and must say so; what runs here is the same source on the CPU. Without nvcc only that.
suite_cuda() {
	local model=$cache/models/random-cuda.gguf dir=build-cuda-one files=(tests/api/test_{device,errors,kv_dtype,openai,websocket}.py)
	if [ "$full" = yes ]; then
		dir=build-cuda files=(tests/api/test_{openai,device,errors,kv,kv_dtype,quirks,sessions,websocket}.py)
	fi
	if [ -x "$(find_nvcc)" ]; then
		if build_cuda; then
			need_cuobjdump
			summed cuda-resources python3 tests/cuda/check_resources.py "$dir"/cuda/*.resources
			summed cuda-sass python3 tests/cuda/check_sass.py "${KVASIR_CUOBJDUMP:-cuobjdump}" "$dir/cuda/product.o" \
				"$dir"/cuda/attention{,_bf16,_int8,_fp8}.o
			[ "$full" = yes ] || check cuda-oldest compiles_for 75
			check cuda-no-gpu no_gpu "$dir/server/kvasir"
			if [ "$full" = yes ]; then
				check cuda-dockerfile runs_in_the_image "$dir/server/kvasir"
				check cuda-without-meson tests/gpu/build.sh build-gpu-sh 90a "$jobs"
			fi
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
	[ "$full" = no ] || check cuda-check-sh tests/gpu/check.sh --build build --device cuda-host --small
	check cuda-check-sh-stops stops_at_what_is_wrong
	KVASIR_TEST_MODEL=$model KVASIR_TEST_DEVICE=cuda-host KVASIR_TEST_SLOW=6 tests_with cuda-api build -n "$jobs" --dist loadfile \
		-m "not trained" "${files[@]}"
	[ "$full" = no ] || KVASIR_CUDA_SWEEP=1 check cuda-every-failure build/tests/unit/test-cuda-failures
}

# Whether nvcc takes each source for a GPU, and the assembler what it makes of it; without optimisation, which is what takes the time.
compiles_for() { # ARCH
	local how=(-cubin -o /dev/null "-arch=sm_$1" -Xcicc -O0 -Xptxas -O0 -std=c++17 -I. --expt-relaxed-constexpr -Werror all-warnings
		-Xcudafe --diag_suppress=177)
	printf '%s\n' cuda/*.cu | xargs -P "$jobs" -n 1 "$(find_nvcc)" "${how[@]}"
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
		c | m | dl | rt | pthread | stdc++ | gcc_s | hiredis | curl) ;;
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

# All backends of x86-64 but AMX's own must have been there, and some test must have run.
over_emulation() { # PROGRAM PATTERN
	local said
	said=$("$1" "$2" 2>&1) || { echo "$said"; return 1; }
	echo "$said"
	grep -qE 'PASSED *\] [1-9]' <<<"$said" && ! grep -qE 'cpu-a(vx.*|mx-emulated): not on this machine' <<<"$said"
}

suite_avx512() {
	if [ "$(uname -m)" != x86_64 ]; then
		skip avx512 "this is no x86-64 machine"
		return
	elif grep -q -m 1 '^flags.* avx512_bf16' /proc/cpuinfo; then
		skip avx512 "this machine has the instructions, and the other suites test them"
		return
	elif [ ! -e /usr/include/simde/x86/avx512.h ]; then
		skip avx512 "libsimde-dev is not installed"
		return
	fi
	local dir=build-avx512 name names='fast narrow' tests='*the_reference*' unit=tests/unit/test-cpu
	if [ "$full" = yes ]; then
		names+=' chunks choice mass plus parts'
		tests='*'
	fi
	if [ ! -f "$dir/build.ninja" ]; then
		check avx512-setup meson setup -Dwerror=true -Demulate_avx512=true -Dcuda=disabled -Dhost_cuda=disabled -Dserver=disabled "$dir" ||
			return
	fi
	# shellcheck disable=SC2086 # one program for each name
	check avx512-build ninja -j "$jobs" -C "$dir" $(printf "$unit-%s " $names) || return
	check avx512-fast over_emulation "$dir/$unit-fast" "$tests"
	for name in ${names#fast}; do
		check "avx512-$name" over_emulation "$dir/$unit-$name" '*'
	done
}

# What only a second architecture of Debian has is looked for by its files.
need_aarch64() {
	local program file
	for program in aarch64-linux-gnu-gcc qemu-aarch64; do
		command -v "$program" >/dev/null && continue
		skip aarch64 "$program is not installed"
		return 1
	done
	for file in cmocka libutf8proc; do
		[ -e "/usr/lib/aarch64-linux-gnu/pkgconfig/$file.pc" ] && continue
		skip aarch64 "the arm64 package of $file is not installed (see .ci/run)"
		return 1
	done
}

# Tests of one program that match a pattern. All NEON backends must have been there, and some test must have run.
under_qemu() { # PROGRAM PATTERN
	local said
	said=$(qemu-aarch64 -cpu max "$1" "$2" 2>&1) || { echo "$said"; return 1; }
	echo "$said"
	grep -qE 'PASSED *\] [1-9]' <<<"$said" && ! grep -qE 'cpu-neon.*: not on this machine' <<<"$said"
}

# A machine without the instructions for products of bytes takes the other kernels, and generates.
generates_under_qemu() { # CPU NAME MODEL
	local said
	said=$(qemu-aarch64 -cpu "$1" build-aarch64/server/kvasir generate --model "$3" --device "$2" --prompt "The engine" \
		--temperature 0 --max-tokens 8 --ignore-eos 2>&1) || { echo "$said"; return 1; }
	echo "$said"
	grep -q 'answer: 8 tokens' <<<"$said"
}

suite_aarch64() {
	need_aarch64 || return
	local dir=build-aarch64 model=$cache/models/random-aarch64.gguf tests='*of_the_reference' unit=tests/unit/test-cpu
	if [ ! -f "$dir/build.ninja" ]; then
		check aarch64-setup meson setup -Dwerror=true --cross-file tests/cross/aarch64.txt -Dcuda=disabled -Dhost_cuda=disabled \
			-Dserver=disabled "$dir" || return
	fi
	check aarch64-build ninja -j "$jobs" -C "$dir" $unit-{backend,chunks,fast,narrow} server/kvasir tests/golden/score || return
	[ "$full" = no ] || tests='*'
	check aarch64-choice qemu-aarch64 -cpu max $dir/$unit-backend
	check aarch64-choice-old qemu-aarch64 -cpu cortex-a72 $dir/$unit-backend
	check aarch64-backends under_qemu $dir/$unit-fast "$tests"
	if [ "$full" = yes ]; then
		check aarch64-narrow under_qemu $dir/$unit-narrow '*'
		check aarch64-chunks under_qemu $dir/$unit-chunks '*of_the_reference'
	else
		check aarch64-rows under_qemu $dir/$unit-fast '*_depend_on_the_others'
	fi
	need_python aarch64-model || return
	KVASIR_RUNNER="qemu-aarch64 -cpu max" KVASIR_BUILD=$PWD/$dir summed aarch64-model "$cache/venv/bin/python" \
		tests/golden/test_tiny_models.py --device cpu-neon --device cpu-neon-dotprod --only "llama Q4_K"
	mkdir -p "$cache/models"
	check aarch64-make-model "$cache/venv/bin/python" tests/tools/make_model.py "$model" --type Q8_0 --layers 2 --embd 256 --ff 512 \
		--heads 4 --kv-heads 2 --ctx 256 || return
	check aarch64-generate generates_under_qemu max cpu-neon-dotprod "$model"
	check aarch64-generate-old generates_under_qemu cortex-a72 cpu "$model"
}

suite_fuzz() {
	need_clang fuzz || return
	need_python fuzz || return
	local seconds=5
	[ "$full" = no ] || seconds=600
	build_fuzz # what is wrong with it is said below
	KVASIR_JOBS=$jobs summed fuzz tests/fuzz/run.sh "$seconds"
}

# Also what meson or a script calls by the name of python3 finds the packages of the tests.
! venv tests/requirements.txt >"$logs/venv.log" 2>&1 || PATH=$cache/venv/bin:$PATH
model
export KVASIR_TEST_MODEL=${KVASIR_TEST_MODEL:-}
start=$SECONDS
took=''
trap stop_ahead EXIT
note() { took+=$(printf '%-10s %6d %6d' "$1" $((SECONDS - before)) $(($(processor_s) - processor)))$'\n'; }

if [ ${#suites[@]} -gt 1 ]; then
	before=$SECONDS processor=$(processor_s)
	heading build
	build build
	note build
	build_ahead "${suites[@]:1}"
fi
for i in "${!suites[@]}"; do
	suite=${suites[i]}
	before=$SECONDS processor=$(processor_s)
	heading "$suite"
	"suite_$suite"
	note "$suite"
	[ -n "$ahead" ] || [ $((i + 1)) -eq ${#suites[@]} ] || build_ahead "${suites[@]:i+1}"
done
before=$SECONDS processor=$(processor_s)
if [ -n "$ahead" ]; then
	wait "$ahead"
	ahead=''
	note '(builds)'
fi
printf '\n%-10s %6s %6s\n%s' suite 's' 'cpu s' "$took"
printf '\nall took %d s, and %d s of processor time; logs are in %s\n' $((SECONDS - start)) "$(processor_s)" "$logs"
[ -z "$failures" ] || printf '\n==== what failed\n%s\n' "$failures"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
