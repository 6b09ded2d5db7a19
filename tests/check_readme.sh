#!/usr/bin/env bash
# The options in README.md are those of the program: check_readme.sh KVASIR. With --write, puts them there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
program=${1:?usage: tests/check_readme.sh KVASIR [--write]}

options=$("$program" help serve | grep -E '^  --')
in_readme=$(awk '/^<!-- options:/ {on = 1} on && /^  --/ {print} on && /^```$/ && ++fences == 2 {exit}' README.md)

if [ "${2:-}" = --write ]; then
	awk -v options="$options" '
		/^<!-- options:/ {on = 1}
		!on || !/^  --/ {print}
		on && /^```$/ { if (++fences == 1) print options; else on = 0 }' README.md >README.md.new
	mv README.md.new README.md
elif [ "$options" != "$in_readme" ]; then
	diff <(echo "$in_readme") <(echo "$options") || true
	echo "README.md does not list the options as they are; run tests/check_readme.sh $program --write"
	exit 1
fi
