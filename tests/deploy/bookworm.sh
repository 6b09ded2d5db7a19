#!/usr/bin/env bash
# tests/deploy/bookworm.sh FILE.tar: a bare Debian 12 (debootstrap's minbase variant), as a tar file. Made once; needs root. The
# mirror is the one that this machine's apt uses. Exits with 77 when it cannot be made here, and says why.
set -euo pipefail
tar=${1:?usage: tests/deploy/bookworm.sh FILE.tar}
[ ! -s "$tar" ] || exit 0

cannot() { echo "$1"; exit 77; }
[ "$(id -u)" -eq 0 ] || cannot "debootstrap needs root"
command -v debootstrap >/dev/null || cannot "debootstrap is not installed (apt-get install debootstrap)"
mirror=$(apt-get indextargets --format '$(REPO_URI) $(CODENAME) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
	awk '$2 == "bookworm" && $3 == "main" {print $1; exit}')
[ -n "$mirror" ] || cannot "apt has no source of Debian bookworm"

mkdir -p "$(dirname "$tar")"
root=$(mktemp -d "$(dirname "$tar")/bookworm.XXXXXX")
trap 'rm -rf "$root" "$tar.part"' EXIT
debootstrap --variant=minbase bookworm "$root" "$mirror" >"$tar.log" 2>&1 ||
	cannot "debootstrap failed (see $tar.log): $(tail -n 1 "$tar.log")"
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" --numeric-owner --one-file-system -cf "$tar.part" .
mv "$tar.part" "$tar"
