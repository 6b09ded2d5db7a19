#!/usr/bin/env bash
# Who may include whom: the arrows between the rooms of the house, and the libraries behind their one door.
# Prints one line per wrong include, then how many rules hold.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

passed=0
failed=0

# rule NAME ROOM WRONG [ALLOWED]: no file of ROOM (a find expression) has an include line that matches WRONG (and not ALLOWED).
rule() {
	local name=$1 room=$2 wrong=$3 allowed=${4:-'^$'} found
	# shellcheck disable=SC2086 # the room is a list of paths
	found=$(find $room -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def' \) -print0 2>/dev/null |
		xargs -0 -r grep -nE '^[[:space:]]*#[[:space:]]*include' /dev/null | grep -E "$wrong" | grep -vE "$allowed")
	if [ -z "$found" ]; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
		echo "FAIL includes: $name"
		while IFS= read -r line; do echo "  $line"; done <<<"$found"
	fi
}

include() { echo "include[[:space:]]*[<\"]($1)"; }

rule "the base library knows nothing above it" engine/base "$(include 'engine/|server/|config/|cuda/')" "$(include engine/base/)"
rule "the configuration knows only the base library" config "$(include 'engine/|server/|cuda/')" "$(include engine/base/)"
rule "the engine does not know the server" "engine cuda" "$(include 'server/|config/')"
rule "the engine knows no network or JSON library" "engine cuda" \
	"$(include '(uv|microhttpd|libwebsockets|jansson|curl)[./]')"
rule "a backend knows its interface, the block formats and the base library" engine/cpu "$(include engine/)" \
	"$(include 'engine/(base/|backend\.h|cpu/|model/quant)')"
rule "the CUDA backend likewise" cuda "$(include engine/)" "$(include 'engine/(base/|backend\.h|model/quant)')"
rule "the server sees the engine through engine.h and tools.h" server "$(include 'engine/|cuda/')" \
	"$(include 'engine/(engine\.h|tools\.h|base/)')|server/json\.[ch]:.*engine/text/value\.h"
rule "libmicrohttpd stays behind http" server "$(include microhttpd)" '^server/http[a-z_]*\.[ch]:'
rule "libwebsockets stays behind ws" server "$(include libwebsockets)" '^server/ws[a-z_]*\.[ch]:'
rule "OpenSSL stays behind tls" server "$(include 'openssl/')" '^server/tls\.c:'
rule "libcurl stays behind mlflow" server "$(include 'curl/')" '^server/mlflow\.c:'
rule "jansson stays behind json" server "$(include jansson)" '^server/json\.[ch]:'

echo "$passed passed, $failed failed, 0 skipped"
[ "$failed" -eq 0 ]
