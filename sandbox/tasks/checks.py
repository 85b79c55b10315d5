"""Helpers of a generated task's tests: copied into its tests/, run by the verifier's Python.

They read and never run: nothing that the agent wrote is executed here. No link may lead out of
/app, and no file is read beyond 1 MiB.
"""

import gzip
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile

ROOT = "/app"
MOST = 1 << 20


def path(name):
    found = os.path.realpath(os.path.join(ROOT, name))
    assert found.startswith(ROOT + "/"), f"{name} leads out of {ROOT}"
    return found


def is_file(name):
    return os.path.isfile(path(name))


def is_directory(name):
    return os.path.isdir(path(name))


def is_gone(name):
    return not os.path.lexists(os.path.join(ROOT, name))


def is_link_to(name, target):
    link = os.path.join(ROOT, name)
    return os.path.islink(link) and path(name) == path(target)


def data(name):
    assert is_file(name), f"{name} is no file"
    with open(path(name), "rb") as file:
        return file.read(MOST)


def text(name):
    return data(name).decode("utf-8", "replace").rstrip()


def lines(name):
    return [line.strip() for line in text(name).splitlines()]


def document(name):
    return json.loads(text(name))


def mode(name):
    return stat.S_IMODE(os.stat(path(name)).st_mode)


def unpacked(name):
    """Text of every file in a tar archive, compressed or not, by its name without './'."""
    found: dict[str, str] = {}
    with tarfile.open(path(name)) as archive:
        for member in archive:
            if member.isfile() and len(found) < 1000:
                file = archive.extractfile(member)
                assert file is not None
                content = file.read(MOST).decode("utf-8", "replace")
                found[os.path.normpath(member.name)] = content.rstrip()
    return found


def gunzipped(name):
    with gzip.open(path(name)) as file:
        return file.read(MOST).decode("utf-8", "replace").rstrip()


def git(repository, *arguments):
    """What git says of a repository's objects and refs, without its config, hooks or filters."""
    source = path(f"{repository}/.git")
    with tempfile.TemporaryDirectory() as folder:
        bare = os.path.join(folder, "bare")
        _run("init", "-q", "--bare", bare)
        for part in ("objects", "refs"):
            shutil.rmtree(os.path.join(bare, part))
            shutil.copytree(os.path.join(source, part), os.path.join(bare, part), symlinks=True)
        for part in ("HEAD", "packed-refs"):
            if os.path.isfile(os.path.join(source, part)):
                shutil.copyfile(os.path.join(source, part), os.path.join(bare, part))
        shutil.rmtree(os.path.join(bare, "objects/info"), ignore_errors=True)
        return _run("--git-dir", bare, *arguments)


def _run(*arguments):
    environment = {"PATH": os.defpath, "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip()
