#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that sandboxes need; does nothing where all are there.
#   ./setup_sandbox.sh              both back ends
#   ./setup_sandbox.sh --local      the local one alone, which is all that `make demo` uses
#   ./setup_sandbox.sh --browser    both, and chromium, in which tests look at the report
#   bubblewrap, util-linux   the local back end       git, tmux, ...   what tasks use inside it
#   docker.io                a Docker Engine           debootstrap      makes the base image
set -euo pipefail

declare -A package_of=([bwrap]=bubblewrap [nsenter]=util-linux [setpriv]=util-linux [git]=git
    [tmux]=tmux [jq]=jq [zip]=zip [unzip]=unzip [ps]=procps [killall]=psmisc)
case ${1:-} in
    --local) ;;
    "" | --browser) package_of+=([dockerd]=docker.io [docker]=docker.io [debootstrap]=debootstrap) ;;
    *)
        echo "error: $1: expected --local, --browser or nothing" >&2
        exit 2
        ;;
esac
[ "${1:-}" != --browser ] || package_of[chromium]=chromium
missing=()
for tool in "${!package_of[@]}"; do
    PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || missing+=("${package_of[$tool]}")
done
[ -x /usr/bin/python3 ] || missing+=(python3)
[ ${#missing[@]} -gt 0 ] || exit 0

mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)
command -v apt-get >/dev/null || {
    echo "error: missing: ${missing[*]}; there is no apt-get here, install them another way" >&2
    exit 1
}
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
echo "setup: installing ${missing[*]}" >&2
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
