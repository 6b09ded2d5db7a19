#!/usr/bin/env bash
# Builds the programs of this directory where there is no meson: tests/gpu/build.sh DIR ARCH JOBS. Needs nvcc, gcc and g++; no library but libc
# and CUDA's. What meson.build says counts; this takes its lists from there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
dir=$1 arch=$2 jobs=$3
mkdir -p "$dir/tests/gpu"
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
flags=(-std=gnu11 -O3 -D_GNU_SOURCE '-DKVASIR_VERSION="check"' -fvisibility=hidden -fno-math-errno -I.)
compare_ops=()
for f in tests/gpu/compare*.c; do
	[ "$f" = tests/gpu/compare_model.c ] || compare_ops+=("$(basename "$f" .c)")
done

{
	for name in $(sed -n "/^cuda_names = \[/,/^\]/s/^ *'\([a-z0-9_]*\)',$/\1/p" cuda/meson.build); do
		echo "$nvcc -c -o $dir/cuda-$name.o -gencode=arch=compute_$arch,code=sm_$arch -std=c++17 -O3 -I. --expt-relaxed-constexpr cuda/$name.cu"
	done
	avx2='-mavx2 -mfma -mf16c -ffp-contract=off'
	avx512='-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mfma -mf16c -mprefer-vector-width=512 -ffp-contract=off'
	bf16="$avx512 -mavx512vbmi -mavx512bf16"
	amx='-mamx-tile -mamx-bf16'
	gcc $amx -E -x c /dev/null >/dev/null 2>&1 || amx= # without them the source has no kernels
	for f in engine/backend.c engine/base/*.c engine/model/*.c engine/sample/*.c engine/cpu/*.c; do
		extra=''
		case $f:$(uname -m) in
		*/sha256_arm.c:* | */sha256_x86.c:* | */sha256.c:* | */hmac.c:*) continue ;; # only the KV index and what moves sessions hash
		*/neon_dotprod.c:aarch64) extra='-march=armv8.2-a+dotprod -ffp-contract=off' ;;
		*/neon*.c:aarch64) extra=-ffp-contract=off ;;
		*/neon*.c:*) continue ;;
		*/avx2*.c:x86_64) extra=$avx2 ;;
		*/avx512_bf16.c:x86_64 | */amx_emulated.c:x86_64) extra=$bf16 ;;
		*/amx.c:x86_64) extra="$bf16 $amx" ;;
		*/avx512*.c:x86_64) extra=$avx512 ;;
		*/avx*.c:* | */amx*.c:*) continue ;;
		esac
		echo "gcc ${flags[*]@Q} $extra -c -o $dir/$(tr / - <<<"${f%.c}").o $f"
	done
	echo "$nvcc -o $dir/tests/gpu/measure -gencode=arch=compute_$arch,code=sm_$arch -std=c++17 -O3 -I. tests/gpu/measure.cu -ldl"
	for f in "${compare_ops[@]}" compare_model bench_gpu whole make_shape; do
		echo "gcc ${flags[*]@Q} -c -o $dir/tests/gpu/$f.o tests/gpu/$f.c"
	done
} | xargs -d '\n' -P "$jobs" -I{} bash -c '{}'

cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
link() {
	local out=$1
	shift
	g++ -o "$dir/tests/gpu/$out" "${@/#/$dir/tests/gpu/}" "$dir"/*.o -L"$cuda/lib64" -L"$cuda/targets/x86_64-linux/lib" -lcudart_static \
		-lpthread -ldl -lrt -lm
}
link compare-ops "${compare_ops[@]/%/.o}"
link compare-model compare_model.o whole.o
link bench-gpu bench_gpu.o whole.o
link make-shape make_shape.o
