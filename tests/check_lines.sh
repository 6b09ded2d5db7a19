#!/usr/bin/env bash
# C, C++ and CUDA sources have lines of at most 120 columns, tabs being 8 wide (CONTRIBUTING.md). The last line is
# "N passed, N failed": files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

passed=0
failed=0
while IFS= read -r file; do
	if expand -t 8 "$file" | awk -v file="$file" 'length($0) > 120 { print file ":" NR ": " length($0) " columns"; bad = 1 } END { exit bad }'; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
done < <(find server engine cuda config tests -type f \( -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | sort)
echo "$passed passed, $failed failed"
[ "$passed" -gt 0 ] && [ "$failed" -eq 0 ]
