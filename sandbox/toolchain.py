"""What local sandboxes see read-only: a pristine Python with pytest, and the few files of /etc.

Made once per version in a cache that every user the sandboxes run as can read. Also used to put the
same Python packages into the base image:  python -m sandbox.toolchain DIRECTORY | --versions
"""

import fcntl
import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from t1jax.errors import UserError

SYSTEM_PYTHON = Path("/usr/bin/python3")  # the one inside, where /usr is the host's
PACKAGES = ("pytest", "pytest-json-ctrf")
FORMAT = "3"  # of the directory made here; part of its name
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "shells": "/bin/sh\n/bin/bash\n",
}
# Of the host's own /etc, what programs link against and look up; mounted over these names.
ETC_DIRECTORIES = ("alternatives", "ssl/certs")
ETC_FILES = ("ssl/openssl.cnf", "ld.so.cache", "localtime", "mime.types", "protocols")


def cache_dir() -> Path:
    """Where this user's sandboxes share files; root's is readable by the users it runs them as."""
    if os.geteuid() == 0:
        return Path("/var/cache/t1jax")
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "t1jax"


@functools.cache
def toolchain() -> Path:
    """The directory with `opt` and `etc`, made now if no process has made it before."""
    if not SYSTEM_PYTHON.exists():
        raise UserError(f"local sandboxes need {SYSTEM_PYTHON}; install python3 with apt or dnf")
    version = _output(SYSTEM_PYTHON, "import sys; print('%d.%d' % sys.version_info[:2])")
    made_from = [FORMAT, version, repr(sorted(ETC.items())), *sorted(_versions())]
    key = hashlib.sha256("\n".join(made_from).encode()).hexdigest()[:16]
    final = cache_dir() / f"toolchain-{key}"
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        with open(final.parent / "toolchain.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.exists():
                _make(final, version)
    return final


def install(site_packages: Path) -> None:
    """Copies pytest, its plugin and what they need from this environment, with bytecode."""
    for name in _closure(PACKAGES):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue  # scripts, and bytecode of another Python
            target = site_packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(distribution.locate_file(file)), target)


def _make(final: Path, version: str) -> None:
    work = Path(tempfile.mkdtemp(prefix="making-", dir=final.parent))
    try:
        site_packages = work / "opt" / "verifier" / "lib" / f"python{version}" / "site-packages"
        install(site_packages)
        (work / "opt" / "verifier" / "bin").mkdir()
        (work / "opt" / "verifier" / "bin" / "python3").symlink_to(SYSTEM_PYTHON)
        (work / "opt" / "verifier" / "pyvenv.cfg").write_text(f"home = {SYSTEM_PYTHON.parent}\n")
        compile_all = [str(SYSTEM_PYTHON), "-m", "compileall", "-q", str(site_packages)]
        subprocess.run(compile_all, check=True, capture_output=True)
        (work / "etc").mkdir()
        for name, text in ETC.items():
            (work / "etc" / name).write_text(text)
        for name in ETC_DIRECTORIES:
            (work / "etc" / name).mkdir(parents=True)
        for name in (*ETC_FILES, "resolv.conf"):
            (work / "etc" / name).touch()
        work.chmod(0o755)
        os.replace(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _closure(names: tuple[str, ...]) -> set[str]:
    """The packages and all that they require in this environment."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = _normal(waiting.pop())
        if name not in found:
            found.add(name)
            waiting.extend(_required(name))
    return found


def _required(name: str) -> Iterator[str]:
    for requirement in importlib.metadata.distribution(name).requires or ():
        needed = _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if "extra ==" not in requirement and _installed(needed):
            yield needed  # one for another platform or an older Python is not installed here


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _versions() -> list[str]:
    return [f"{name}={importlib.metadata.version(name)}" for name in _closure(PACKAGES)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _output(python: Path, program: str) -> str:
    command = [str(python), "-I", "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1] == "--versions":
        print(*sorted(_versions()), sep="\n")
    else:
        install(Path(sys.argv[1]))
