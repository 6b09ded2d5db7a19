#!/bin/sh
# Runs each fuzz target for SECONDS on its seeds: tests/fuzz/run.sh SECONDS [TARGET...]; with --build in their place it only builds them.
# $KVASIR_JOBS at a time (default: the CPUs). Builds with clang (libFuzzer, ASan, UBSan) in $KVASIR_FUZZ_BUILD (default build-fuzz). Prints one line per target and
# their sum; the exit status is 1 when one found something, whose input and log then lie in that folder's findings/. The corpus grows from run
# to run in corpus/.
set -eu

seconds=${1:?usage: tests/fuzz/run.sh SECONDS [TARGET...]}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
build=${KVASIR_FUZZ_BUILD:-$root/build-fuzz}

if [ ! -f "$build/build.ninja" ]; then
	CC=clang meson setup "$build" "$root" -Dfuzz=true -Dtests=disabled -Dcuda=disabled -Dbuildtype=debugoptimized \
		-Db_sanitize=address,undefined -Db_lundef=false >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
	rm -f "$build.log"
fi
ninja -C "$build" -j "${KVASIR_JOBS:-$(nproc)}" fuzz-targets >"$build/fuzz-build.log" 2>&1 || { tail -n 40 "$build/fuzz-build.log"; exit 1; }
[ "$seconds" != --build ] || exit 0
python3 "$root/tests/fuzz/make_seeds.py" "$build/seeds" ||
	{ echo "make_seeds.py failed; it wants the packages of tests/requirements.txt" >&2; exit 1; }

if [ $# -eq 0 ]; then
	for exe in "$build"/tests/fuzz/fuzz-*; do
		[ -f "$exe" ] && [ -x "$exe" ] && set -- "$@" "${exe##*/fuzz-}"
	done
fi

figure() { # NAME FILE: a figure of -print_final_stats
	sed -n "s/^stat::$1: *//p" "$2" | tail -n 1
}

mkdir -p "$build/findings"

# Fuzzes one target and prints its line.
fuzz() {
	name=$1 corpus=$build/corpus/$1 seeds=$build/seeds/$1 log=$build/findings/$1.log dict=$root/tests/fuzz/$1.dict
	mkdir -p "$corpus" "$seeds"
	set -- -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
		-artifact_prefix="$build/findings/$name-"
	[ -f "$dict" ] && set -- "$@" -dict="$dict"
	if "$build/tests/fuzz/fuzz-$name" "$@" "$corpus" "$seeds" >"$log" 2>&1; then
		printf '%-12s ok       %s runs, %s inputs in the corpus\n' "$name" "$(figure number_of_executed_units "$log")" \
			"$(find "$corpus" -type f | wc -l)"
	else
		printf '%-12s FINDING  %s\n' "$name" "$(grep -m 1 -E 'SUMMARY|ERROR|runtime error' "$log" || echo "see $log")"
		grep -E 'Test unit written|artifact' "$log" || true
	fi
}

# A few at a time; each prints into a file of its own, so that lines do not mix.
jobs=${KVASIR_JOBS:-$(nproc)} running=0
for name in "$@"; do
	fuzz "$name" >"$build/findings/$name.result" 2>&1 &
	running=$((running + 1))
	if [ "$running" -ge "$jobs" ]; then
		wait
		running=0
	fi
done
wait
passed=0 failed=0
for name in "$@"; do
	cat "$build/findings/$name.result"
	if grep -q '^[^ ]* *ok ' "$build/findings/$name.result"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
