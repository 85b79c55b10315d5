#!/usr/bin/env bash
# Makes the base image of the shipped tasks without any registry of images:
#   make_base.sh [NAME]     NAME is sandbox.base.BASE_IMAGE unless given
# Needs root, debootstrap, docker (its command line and a running engine), and a Debian mirror in
# MIRROR. Does nothing when the engine has an image made from the same definition.
# PYTHON: a Python whose pytest and pytest-json-ctrf go into the image, with what they need.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python=${PYTHON:-python3}
export PYTHONPATH=../..
name=${1:-$("$python" -c 'from sandbox.base import BASE_IMAGE; print(BASE_IMAGE)')}
mirror=${MIRROR:-http://deb.debian.org/debian}
suite=bookworm
packages=$(grep -v '^#' packages.txt | paste -sd,)

fail() {
    echo "error: $*" >&2
    exit 1
}
[ "$(id -u)" = 0 ] || fail "debootstrap needs root; run: sudo $0"
for tool in debootstrap docker; do
    command -v "$tool" >/dev/null || fail "$tool is missing; run: apt-get install debootstrap docker.io"
done
docker version >/dev/null 2>&1 || fail "no Docker Engine answers at ${DOCKER_HOST:-the local socket}"

definition=$({
    cat packages.txt make_base.sh
    "$python" -m sandbox.toolchain --versions
} | sha256sum | cut -c1-16)
made_from() { docker image inspect --format '{{index .Config.Labels "t1jax.definition"}}' "$1" 2>/dev/null; }
if [ "$(made_from "$name")" = "$definition" ]; then
    echo "$name is there already"
    exit
fi

root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
echo "debootstrap $suite from $mirror" >&2
debootstrap --variant=minbase --include="$packages" "$suite" "$root" "$mirror" >"$root.log" 2>&1 ||
    { tail -n 20 "$root.log" >&2 && rm -f "$root.log" && fail "debootstrap failed"; }
rm -f "$root.log"

version=$(chroot "$root" /usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
mkdir -p "$root/opt/verifier/bin"
ln -s /usr/bin/python3 "$root/opt/verifier/bin/python3"
echo "home = /usr/bin" >"$root/opt/verifier/pyvenv.cfg"
"$python" -m sandbox.toolchain "$root/opt/verifier/lib/python$version/site-packages"
chroot "$root" /usr/bin/python3 -m compileall -q /opt/verifier
mkdir -p "$root/app"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/tmp/* \
    "$root"/usr/share/doc/* "$root"/usr/share/man/* "$root"/usr/share/locale/*

tar --create --numeric-owner --one-file-system --directory "$root" . |
    docker import --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
        --change "ENV LANG=C.UTF-8" --change "WORKDIR /app" --change "CMD [\"bash\"]" \
        --change "LABEL t1jax.definition=$definition" - "$name" >/dev/null
echo "$name made"
