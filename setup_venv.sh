#!/usr/bin/env bash
# Makes a virtual environment with t1jax (editable) in it:  setup_venv.sh DIR [EXTRAS]
#   DIR     where, e.g. .venv
#   EXTRAS  comma-separated extras of setup.py, e.g. test,hf; none for the library alone
# Uses $PYTHON (default python3). Returns at once when DIR already holds all that is asked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

dir=$1
wanted=${2:-}
python=${PYTHON:-python3}
stamp=$dir/.installed # line 1: what the environment was made from; line 2: ",extra,extra,"

fail() {
    echo "error: $*" >&2
    exit 1
}

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    fail "cannot run '$python'; set PYTHON to a Python of 3.11 or later, e.g. PYTHON=python3.13"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$python is Python $version; t1jax needs 3.11 or later (set PYTHON=python3.13, say)"

made_from="$version $PWD $(cat setup.py constraints.txt setup_venv.sh | cksum)"
installed=,
if [ -f "$stamp" ]; then
    { read -r was_made_from && read -r installed; } <"$stamp" || installed=,
    [ "$was_made_from" = "$made_from" ] || installed=stale
fi

if [ "$installed" != stale ] && [ -f "$stamp" ]; then
    missing=
    for extra in ${wanted//,/ }; do
        case $installed in *",$extra,"*) ;; *) missing=yes ;; esac
    done
    [ -n "$missing" ] || exit 0
else
    installed=,
fi

install_venv_module() {
    local package="python${version%.*}-venv" as_root=
    [ "$(id -u)" = 0 ] || as_root=sudo
    local remedy="run: apt-get install $package (or install Python's venv and ensurepip modules)"
    command -v apt-get >/dev/null || fail "$python has no ensurepip and there is no apt-get; $remedy"
    [ -z "$as_root" ] || command -v sudo >/dev/null ||
        fail "$python has no ensurepip, and installing it needs root; $remedy"
    echo "setup: $python has no ensurepip; installing $package" >&2
    $as_root apt-get update -qq && $as_root apt-get install -y -qq "$package" >&2 ||
        fail "could not install $package; $remedy"
}

"$python" -c 'import ensurepip, venv' 2>/dev/null || install_venv_module

if ! [ -x "$dir/bin/python" ] ||
    [ "$("$dir/bin/python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')" != "$version" ]; then
    echo "setup: making $dir with Python $version" >&2
    rm -rf "$dir"
    "$python" -m venv "$dir"
fi

for extra in ${wanted//,/ }; do
    case $installed in *",$extra,"*) ;; *) installed+="$extra," ;; esac
done
extras=${installed#,}
extras=${extras%,}
echo "setup: installing t1jax${extras:+[$extras]} into $dir" >&2
rm -f "$stamp"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable ".${extras:+[$extras]}"
printf '%s\n%s\n' "$made_from" "$installed" >"$stamp"
