#!/usr/bin/env bash
# From a fresh Debian 12 or 13 machine to a daemon that answers chat. Safe to run again: what is done is not done twice.
set -euo pipefail

usage() {
	cat <<-'TEXT'
		usage: deploy/quickstart.sh [--prefix DIR] [--port N] [--no-serve]
		  --prefix DIR  where the build, the program and the model go (default: ~/.local/share/kvasir)
		  --port N      port to serve on (default: 8080)
		  --no-serve    prepare everything and stop
	TEXT
}

prefix=${XDG_DATA_HOME:-$HOME/.local/share}/kvasir
port=8080
serve=yes
while [ $# -gt 0 ]; do
	case $1 in
	--prefix) prefix=${2:?--prefix needs a directory}; shift 2 ;;
	--prefix=*) prefix=${1#*=}; shift ;;
	--port) port=${2:?--port needs a number}; shift 2 ;;
	--port=*) port=${1#*=}; shift ;;
	--no-serve) serve=no; shift ;;
	-h | --help) usage; exit 0 ;;
	*) usage >&2; exit 2 ;;
	esac
done

source_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
step() { printf '\n==> [%s/4] %s\n' "$1" "$2"; }

step 1 "Debian packages"
packages=(gcc libc6-dev meson ninja-build pkg-config libuv1-dev libmicrohttpd-dev libwebsockets-dev libssl-dev
	libwebsockets-evlib-uv libjansson-dev libutf8proc-dev liburing-dev libcurl4-openssl-dev python3 python3-pip python3-websockets ca-certificates curl)
missing=()
for p in "${packages[@]}"; do
	dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -eq 0 ]; then
	echo "all there"
else
	echo "installing: ${missing[*]}"
	as_root=()
	[ "$(id -u)" -eq 0 ] || as_root=(sudo)
	"${as_root[@]}" apt-get update -q
	"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" </dev/null
fi

step 2 "Building in $prefix/build"
mkdir -p "$prefix"
prefix=$(cd "$prefix" && pwd)
if [ ! -f "$prefix/build/build.ninja" ]; then
	meson setup --buildtype=release --prefix="$prefix" -Dtests=disabled -Dcuda=disabled "$prefix/build" "$source_dir"
fi
ninja -C "$prefix/build" server/kvasir
install -D -m 755 "$prefix/build/server/kvasir" "$prefix/bin/kvasir"

step 3 "The model, about 100 MB"
model=$(python3 "$source_dir/tests/tools/fetch_models.py" "$prefix/models")
echo "$model"

step 4 "Serving on port $port"
cat <<TEXT
Once it says it is ready, try, from another terminal:

  curl http://127.0.0.1:$port/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"max_tokens":80}'

  (echo '{"type":"response.create","input":"Why is the sky blue?","max_output_tokens":80}'; sleep 10) |
    /usr/bin/python3 -m websockets ws://127.0.0.1:$port/v1/responses

  or open http://127.0.0.1:$port/ in a browser.

TEXT
if [ "$serve" = no ]; then
	echo "To serve:  $prefix/bin/kvasir serve --model $model --port $port"
	exit 0
fi
exec "$prefix/bin/kvasir" serve --model "$model" --port "$port"
