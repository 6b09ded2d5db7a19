#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU and no network: builds, compares every operation and whole models with the CPU, looks for
# memory errors and races with compute-sanitizer, measures, and prints one table. It stops at the first wrong number and still prints what it
# has. Under 8 minutes on 16 cores; each part has a limit of its own, none runs on past --minutes, and those left out are named.
#
#   tests/gpu/check.sh [--build DIR] [--arch 90a] [--device cuda] [--work DIR] [--minutes 8] [--out FILE] [--small]
#
#   --build    a build directory from elsewhere, with the programs of tests/gpu/; else they are built here by meson, which needs nvcc, a C and
#              a C++ compiler; by tests/gpu/build.sh where there is no meson or libutf8proc
#   --work     where models go (25 GB; default: /dev/shm when it has room, else $TMPDIR)
#   --small    the tiny model in place of each: every line of this script, on the emulated GPU (--device cuda-host)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

build='' arch='' device=cuda work='' minutes=8 out=/dev/null small=no
slow=1       # how many times longer parts may take
incomplete=0 # parts that were stopped or left out
while [ $# -gt 0 ]; do
	case $1 in
	--build) build=$(cd "$2" && pwd); shift 2 ;;
	--arch) arch=$2; shift 2 ;;
	--device) device=$2; shift 2 ;;
	--work) work=$2; shift 2 ;;
	--minutes) minutes=$2; shift 2 ;;
	--out) out=$2; shift 2 ;;
	--small) small=yes slow=6 minutes=40; shift ;;
	*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
	esac
done

start=$SECONDS
deadline=$((start + minutes * 60))
table=$(mktemp)
made_work=no models=''
finish() {
	local status=$?
	[ -z "$models" ] || kill "$models" 2>/dev/null
	printf '\n==== what is known after %d s\n\n' $((SECONDS - start))
	tee "$out" <"$table"
	rm -f "$table"
	[ "$made_work" = no ] || rm -rf "$work"
	exit "$status"
}
trap finish EXIT

say() { echo "$*" | tee -a "$table"; }
left() { echo $((deadline - SECONDS)); }

# part NAME SECONDS COMMAND...: its output goes to the table. A failure ends the script; a part that would end too late is named and left out.
part() {
	local name=$1 limit=$(($2 * slow)) begin=$SECONDS status
	shift 2
	if [ "$(left)" -lt 20 ]; then
		say "-- $name: left out, the time is up"
		incomplete=$((incomplete + 1))
		return
	fi
	[ "$limit" -le "$(left)" ] || limit=$(left)
	say "-- $name"
	timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$table"
	status=${PIPESTATUS[0]}
	if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
		say "-- $name: stopped after $limit s"
		incomplete=$((incomplete + 1))
	elif [ "$status" -eq 77 ]; then
		say "-- there is no device $device to check"
		exit 77
	elif [ "$status" -ne 0 ]; then
		say "-- $name: WRONG (status $status)"
		exit 1
	fi
	say "   ($((SECONDS - begin)) s)"
}

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cores=$(nproc)
toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
# cuBLASLt is looked up when it is needed; it may be known to the toolkit alone.
export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$toolkit/lib64:$toolkit/targets/x86_64-linux/lib

# ---- programs

if [ -z "$arch" ]; then
	arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
	arch=${arch:-90a}
	[ "$arch" != 90 ] || arch=90a
fi
compile() {
	set -o pipefail
	if command -v meson >/dev/null && command -v ninja >/dev/null && pkg-config --exists libutf8proc; then
		{ [ -f "$build/build.ninja" ] || meson setup "$build" -Dserver=disabled -Dtests=disabled -Dcuda=enabled -Dgpu_arch="$arch" >/dev/null; } &&
			ninja -C "$build" -j "$cores" tests/gpu/{compare-ops,compare-model,bench-gpu,make-shape,measure} | tail -n 20
	else
		tests/gpu/build.sh "$build" "$arch" "$cores"
	fi
}
if [ -z "$build" ]; then
	build=$PWD/build-gpu-check-$arch
	export -f compile
	export build arch cores
	part "build for sm_$arch" 240 bash -c compile
fi
tools=$build/tests/gpu
measure=("$tools/measure")
if [ "$small" = yes ]; then
	measure=("$tools/measure-host" --small)
fi

# ---- models

if [ -z "$work" ]; then
	free=$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)
	[ "$small" = yes ] || [ "${free:-0}" -lt 40000000 ] || TMPDIR=/dev/shm
	work=$(TMPDIR=${TMPDIR:-/tmp} mktemp -d -t kvasir-check.XXXXXX) || exit 1
	made_work=yes
fi
make_model() { # SHAPE TYPE
	local shape=$1
	[ "$small" = no ] || shape=tiny
	[ -f "$work/$1-$2.gguf" ] || { "$tools/make-shape" "$work/$1-$2.part" "$shape" "$2" && mv "$work/$1-$2.part" "$work/$1-$2.gguf"; }
}
make_models() { make_model 1b BF16 && make_model 1b Q4_K && make_model 8b Q4_K && make_model 8b BF16; }
make_model tiny BF16 && make_model tiny Q4_K || { say "no model could be made"; exit 1; }
make_models & # while operations are compared
models=$!

# ---- right?

reference=cpu large=(--large)
[ "$small" = no ] || large=(--seed 5)
part "every operation, small shapes" 60 "$tools/compare-ops" "$device"
part "tiny BF16 against the reference" 30 "$tools/compare-model" "$work/tiny-BF16.gguf" "$device"
part "tiny Q4_K against the reference" 30 "$tools/compare-model" "$work/tiny-Q4_K.gguf" "$device"
for kv in int8 fp8_e4m3; do
	part "tiny BF16, KV in $kv, against the reference" 30 "$tools/compare-model" --kv "$kv" "$work/tiny-BF16.gguf" "$device"
done
part "tiny BF16, positions in chunks, against the reference" 30 "$tools/compare-model" --rope-scaling dca:4,original=100,chunk=64 \
	"$work/tiny-BF16.gguf" "$device" "cpu-reference" 200 12
sanitizer=$(command -v compute-sanitizer || echo "$toolkit/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
	# A prompt so long that every kernel runs: those for many rows, too.
	for tool in memcheck racecheck synccheck; do
		part "compute-sanitizer $tool, tiny Q4_K" 40 "$sanitizer" --tool "$tool" --error-exitcode 1 \
			"$tools/compare-model" "$work/tiny-Q4_K.gguf" "$device" "$reference" 130 3
	done
	# What only context policies, positions in chunks, and conversations larger than the pool ask of a device.
	for only in choice mass plus probe chunks far; do
		for tool in memcheck racecheck; do
			part "compute-sanitizer $tool, $only" 40 "$sanitizer" --tool "$tool" --error-exitcode 1 \
				"$tools/compare-ops" "$device" --only "$only"
		done
	done
	part "compute-sanitizer memcheck, tiny BF16, KV in int8" 40 "$sanitizer" --tool memcheck --error-exitcode 1 \
		"$tools/compare-model" --kv int8 "$work/tiny-BF16.gguf" "$device" "$reference" 130 3
else
	say "-- compute-sanitizer: not on this machine"
fi
part "every operation, real shapes" 90 "$tools/compare-ops" "$device" "${large[@]}" --reference "$reference"
wait "$models" || { say "no model could be made"; exit 1; }
models=''
part "1b Q4_K against the CPU" 60 "$tools/compare-model" "$work/1b-Q4_K.gguf" "$device" "$reference" 64 8
part "1b BF16 against the CPU" 60 "$tools/compare-model" "$work/1b-BF16.gguf" "$device" "$reference" 64 8

# ---- fast?

if ! measured=$(timeout 60 "${measure[@]}"); then
	say "$measured"
	say "-- the GPU cannot be measured"
	exit 1
fi
say "$measured"
value() { awk -v name="$1" '$1 == name { print $2 }' <<<"$measured"; }
copy=$(value copy_gbs) product=$(value product_tflops)
flags=()
[ "$small" = no ] || flags=(--quick --small)
for file in 8b-Q4_K 8b-BF16 1b-Q4_K 1b-BF16; do
	part "$file" 100 "$tools/bench-gpu" "$work/$file.gguf" "$device" --copy "$copy" --product "$product" "${flags[@]}"
done
part "8b-Q4_K, KV in int8" 60 "$tools/bench-gpu" "$work/8b-Q4_K.gguf" "$device" --copy "$copy" --product "$product" --kv int8 "${flags[@]}"
say "0 failed, $incomplete stopped or left out"
[ "$incomplete" -eq 0 ]
