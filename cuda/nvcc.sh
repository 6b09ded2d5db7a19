#!/bin/sh
# nvcc.sh NVCC OBJECT RESOURCES SOURCE [ARGUMENTS...]: compiles one source with nvcc. What ptxas says of each kernel's registers, spills
# and memory goes to the file RESOURCES, which tests/cuda/check_resources.py reads; anything else it says goes to stderr.
set -u
nvcc=$1 object=$2 resources=$3 source=$4
shift 4
"$nvcc" -c -o "$object" -Xptxas -v "$@" "$source" >"$resources" 2>&1
status=$?
grep -vE '^ptxas info|^    [0-9]+ bytes stack frame|^[0-9]+ bytes stack frame' "$resources" >&2
exit $status
