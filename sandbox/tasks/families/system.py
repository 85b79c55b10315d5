"""Checksums, environment variables and processes."""

import base64
import hashlib

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Step, holds, made, one_line, text_of


def _token(*parts: str) -> str:
    """What `printf '%s' … | sha256sum | cut -c1-8` prints in the scripts below."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]


def sha256(draw: Draw) -> Step:
    source, output = f"{draw.name()}.txt", f"{draw.name()}.txt"
    content = text_of([*draw.lines(3), draw.name()])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Step(
        say=f"Write the SHA-256 checksum of {source} to {output}.",
        solve=(f"sha256sum {source} > {output}",),
        files={source: content},
        checks=(
            one_line(output),
            (f"{output} has the checksum", f"text({output!r}).split()[0] == {digest!r}"),
        ),
    )


def find_by_checksum(draw: Draw) -> Step:
    folder, name, output = draw.name(), f"{draw.name()}.dat", f"{draw.name()}.txt"
    files = {f"{folder}/{draw.word()}{i}.dat": text_of(draw.lines(2)) for i in range(4)}
    content = text_of([draw.name()])
    digest = hashlib.md5(content.encode()).hexdigest()
    return Step(
        say=f"Write the name of the file in {folder} with the MD5 checksum {digest} to {output}.",
        solve=(f"md5sum {folder}/* | grep {digest} | cut -c35- > {output}",),
        files=files | {f"{folder}/{name}": content},
        checks=(
            one_line(output),
            (f"{output} names the file", f"text({output!r}).split('/')[-1] == {name!r}"),
        ),
    )


def decode(draw: Draw) -> Step:
    source, output, word = f"{draw.name()}.b64", f"{draw.name()}.txt", draw.name()
    coded = base64.b64encode(f"{word}\n".encode()).decode()
    return Step(
        say=f"Decode the base64 text in {source} into {output}.",
        solve=(f"base64 -d {source} > {output}",),
        files={source: f"{coded}\n"},
        checks=(made(output), holds(output, word)),
    )


def run_with_variable(draw: Draw) -> Step:
    script, output, value = f"{draw.name()}.sh", f"{draw.name()}.txt", draw.name()
    salt = draw.name()
    variable = draw.rng.choice(("COLOR", "MODE", "TEAM", "ZONE"))
    program = f"#!/bin/sh\nprintf '%s' \"{salt} ${variable}\" | sha256sum | cut -c1-8\n"
    return Step(
        say=f"Run {script} with {variable} set to {value} and write what it prints to {output}.",
        solve=(f"{variable}={value} ./{script} > {output}",),
        files={script: program},
        modes={script: 0o755},
        checks=(one_line(output), holds(output, _token(salt, value))),
    )


def read_settings(draw: Draw) -> Step:
    source, output = f"{draw.name()}.env", f"{draw.name()}.txt"
    settings = {f"{draw.word().upper()}_{index}": draw.number() for index in range(4)}
    key = draw.rng.choice(list(settings))
    return Step(
        say=f"Write the value of {key} in {source} to {output}.",
        solve=(f"grep {key} {source} | cut -d= -f2 > {output}",),
        files={source: text_of([f"{name}={value}" for name, value in settings.items()])},
        checks=(one_line(output), holds(output, str(settings[key]))),
    )


def run_with_settings(draw: Draw) -> Step:
    source, script, output = f"{draw.name()}.env", f"{draw.name()}.sh", f"{draw.name()}.txt"
    salt, value = draw.name(), draw.name()
    program = f"#!/bin/sh\nprintf '%s' \"{salt} $PLACE\" | sha256sum | cut -c1-8\n"
    return Step(
        say=f"Export the variables in {source}, run {script} and write what it prints to {output}.",
        solve=("set -a", f". ./{source}", "set +a", f"./{script} > {output}"),
        files={source: f"PLACE={value}\n", script: program},
        modes={script: 0o755},
        checks=(one_line(output), holds(output, _token(salt, value))),
    )


def stop_process(draw: Draw) -> Step:
    script, output = f"{draw.name()}.sh", f"{draw.name()}.txt"
    salt = draw.name()
    program = f"""#!/bin/bash
stopped() {{ printf '%s' "{salt} stopped" | sha256sum | cut -c1-8 > {output}; exit; }}
trap stopped TERM
echo ready > {output}
for turn in $(seq 600); do sleep 0.05; done
"""
    wait = f"until [ -s {output} ]; do sleep 0.02; done"
    return Step(
        say=f"Run {script} in the background. When {output} is there, stop it with TERM.",
        solve=(f"./{script} &", wait, "kill $! ; wait $!"),
        files={script: program},
        modes={script: 0o755},
        checks=(made(output), holds(output, _token(salt, "stopped"))),
    )


def exit_status(draw: Draw) -> Step:
    script, output, status = f"{draw.name()}.sh", f"{draw.name()}.txt", draw.rng.randint(3, 120)
    return Step(
        say=f"Run {script} and write its exit status to {output}.",
        solve=(f"./{script} ; echo $? > {output}",),
        files={script: f"#!/bin/bash\nexit $(( {status - 2} + 2 ))\n"},
        modes={script: 0o755},
        checks=(one_line(output), holds(output, str(status))),
    )


def run_both(draw: Draw) -> Step:
    scripts, outputs = [], []
    files = {}
    for _ in range(2):
        script, output, salt = f"{draw.name()}.sh", f"{draw.name()}.txt", draw.name()
        files[script] = f"#!/bin/sh\nprintf '%s' '{salt} ran' | sha256sum | cut -c1-8\n"
        scripts.append(script)
        outputs.append((output, _token(salt, "ran")))
    (first, _), (second, _) = outputs
    return Step(
        say=f"Run {scripts[0]} and {scripts[1]} at the same time. Write what the first prints to "
        f"{first} and what the second prints to {second}.",
        solve=(f"./{scripts[0]} > {first} &", f"./{scripts[1]} > {second} &", "wait"),
        files=files,
        modes=dict.fromkeys(scripts, 0o755),
        checks=tuple(holds(output, token) for output, token in outputs),
    )


CHECKSUMS = (sha256, find_by_checksum, decode)
ENVIRONMENT = (run_with_variable, read_settings, run_with_settings)
PROCESSES = (stop_process, exit_status, run_both)
