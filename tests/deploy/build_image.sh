#!/usr/bin/env bash
# tests/deploy/build_image.sh DIR: builds the Dockerfile without a Docker engine and without a registry. buildah keeps its images
# under DIR; the base image is a Debian made by bookworm.sh under the name that the Dockerfile asks for. Prints the image's name.
# Exits with 77 when it cannot be done here, and says why. Arguments after DIR go to `buildah bud`.
set -euo pipefail
dir=${1:?usage: tests/deploy/build_image.sh DIR [BUILDAH ARGUMENTS]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source_dir=$(cd "$here/../.." && pwd)

command -v buildah >/dev/null || { echo "buildah is not installed (apt-get install buildah)"; exit 77; }
mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
"$here/bookworm.sh" "$dir/bookworm.tar"

buildah() { command buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver vfs "$@"; }

for base in $(sed -nE 's/^FROM ([^ ]*debian[^ ]*).*/\1/p' "$source_dir/Dockerfile" | sort -u); do
	buildah inspect --type image "docker.io/library/$base" >/dev/null 2>&1 && continue
	container=$(buildah from scratch)
	buildah add --quiet "$container" "$dir/bookworm.tar" / >&2
	buildah config --cmd bash "$container"
	buildah commit --quiet --rm "$container" "docker.io/library/$base" >&2
done

# The format is Docker's because that of the OCI has no health check.
buildah bud --isolation chroot --pull-never --format docker --tag kvasir-test "$@" "$source_dir" >&2
# What the name stood for before.
buildah rmi --prune >/dev/null 2>&1 || true
echo kvasir-test
