#!/usr/bin/env bash
# One command for a machine with an NVIDIA GPU and no network: builds, compares every operation and whole models with the CPU, looks for
# memory errors and races with compute-sanitizer, measures, and prints one table. It stops at the first wrong number and still prints what it
# has. Under 8 minutes on 16 cores; each part has a limit of its own, and parts that would end after --minutes are left out by name.
#
#   tests/gpu/check.sh [--build DIR] [--arch 90a] [--device cuda] [--work DIR] [--minutes 8] [--out FILE] [--small]
#
#   --build    programs built elsewhere (a build directory that has tests/gpu/, and `measure`); else they are built here by meson, which needs
#              nvcc, a C and a C++ compiler; by tests/gpu/build.sh where there is no meson or libutf8proc
#   --work     where models go (19 GB; default: /dev/shm when it has room, else $TMPDIR)
#   --small    only the tiny model, for a try on the emulated GPU (--device cuda-host)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2

build='' arch='' device=cuda work='' minutes=8 out=/dev/null small=no
while [ $# -gt 0 ]; do
	case $1 in
	--build) build=$(cd "$2" && pwd); shift 2 ;;
	--arch) arch=$2; shift 2 ;;
	--device) device=$2; shift 2 ;;
	--work) work=$2; shift 2 ;;
	--minutes) minutes=$2; shift 2 ;;
	--out) out=$2; shift 2 ;;
	--small) small=yes; shift ;;
	*) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
	esac
done

start=$SECONDS
deadline=$((start + minutes * 60))
table=$(mktemp)
made_work=no
finish() {
	local status=$?
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
	local name=$1 limit=$2 begin=$SECONDS status
	shift 2
	if [ "$(left)" -lt 20 ]; then
		say "-- $name: left out, the time is up"
		return
	fi
	[ "$limit" -le "$(left)" ] || limit=$(left)
	say "-- $name"
	timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$table"
	status=${PIPESTATUS[0]}
	if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
		say "-- $name: stopped after $limit s"
	elif [ "$status" -eq 77 ]; then
		say "-- $name: skipped"
	elif [ "$status" -ne 0 ]; then
		say "-- $name: WRONG (status $status)"
		exit 1
	fi
	say "   ($((SECONDS - begin)) s)"
}

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
cores=$(nproc)

# ---- programs

if [ -z "$arch" ]; then
	arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d .)
	[ "$arch" != 90 ] || arch=90a
fi
compile() {
	if command -v meson >/dev/null && command -v ninja >/dev/null && pkg-config --exists libutf8proc; then
		meson setup "$build" -Dserver=disabled -Dtests=disabled -Dcuda=enabled -Dgpu_arch="${arch:-90a}" >/dev/null &&
			ninja -C "$build" -j "$cores" tests/gpu/compare-ops tests/gpu/compare-model tests/gpu/bench-gpu tests/gpu/make-shape | tail -n 1
	else
		tests/gpu/build.sh "$build" "${arch:-90a}" "$cores"
	fi && "$nvcc" -O3 -std=c++17 -gencode "arch=compute_${arch:-90a},code=sm_${arch:-90a}" -o "$build/measure" tests/gpu/measure.cu -ldl
}
if [ -z "$build" ]; then
	build=$PWD/build-gpu-check
	export -f compile
	export build arch cores nvcc
	part "build for sm_${arch:-90a}" 240 bash -c compile
fi
tools=$build/tests/gpu

# ---- models

if [ -z "$work" ]; then
	work=$(mktemp -d "$(df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $1 > 40000000 { print "/dev/shm" }')/kvasir-check.XXXXXX" 2>/dev/null ||
		mktemp -d)
	made_work=yes
fi
model() { # SHAPE TYPE: the file, made when it is not there
	local file=$work/$1-$2.gguf
	[ -f "$file" ] || "$tools/make-shape" "$file" "$1" "$2" || return
	echo "$file"
}

# ---- right?

tiny_bf16=$(model tiny BF16) && tiny_q4=$(model tiny Q4_K) || { say "no model could be made"; exit 1; }
part "every operation, small shapes" 60 "$tools/compare-ops" "$device"
part "tiny BF16 against the reference" 30 "$tools/compare-model" "$tiny_bf16" "$device"
part "tiny Q4_K against the reference" 30 "$tools/compare-model" "$tiny_q4" "$device"
if [ "$small" = yes ]; then
	part "measurements of the tiny model" 300 "$tools/bench-gpu" "$tiny_q4" "$device" --copy 1 --product 1 --quick --small
	say "0 failed"
	exit 0
fi
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ -x "$sanitizer" ]; then
	for tool in memcheck racecheck; do
		part "compute-sanitizer $tool, tiny Q4_K" 40 "$sanitizer" --tool "$tool" --error-exitcode 1 \
			"$tools/compare-model" "$tiny_q4" "$device" cpu 20 3
	done
else
	say "-- compute-sanitizer: not on this machine"
fi
part "every operation, real shapes" 90 "$tools/compare-ops" "$device" --large --reference cpu
(model 1b BF16 && model 1b Q4_K && model 8b Q4_K && model 8b BF16) >/dev/null || { say "no model could be made"; exit 1; }
part "1b Q4_K against the CPU" 60 "$tools/compare-model" "$work/1b-Q4_K.gguf" "$device" cpu 64 8
part "1b BF16 against the CPU" 60 "$tools/compare-model" "$work/1b-BF16.gguf" "$device" cpu 64 8

# ---- fast?

measured=$("$build/measure") || { say "the GPU cannot be measured"; exit 1; }
say "$measured"
value() { awk -v name="$1" '$1 == name { print $2 }' <<<"$measured"; }
copy=$(value copy_gbs) product=$(value product_tflops)
[ "$product" != none ] || product=1e9
for file in 8b-Q4_K 8b-BF16 1b-Q4_K 1b-BF16; do
	part "$file" 100 "$tools/bench-gpu" "$work/$file.gguf" "$device" --copy "$copy" --product "$product"
done
say "0 failed"
