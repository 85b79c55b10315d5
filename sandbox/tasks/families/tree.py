"""Files and directories: making, moving, linking, finding, permissions, archives."""

import gzip
import io
import tarfile

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Check, Step, holds, made, text_of


def make_directory(draw: Draw) -> Step:
    outer, inner = draw.name(), draw.name()
    return Step(
        say=f"Make the directory {outer} and in it the directory {inner}.",
        solve=(f"mkdir -p {outer}/{inner}",),
        checks=(
            (f"{outer} is a directory", f"is_directory({outer!r})"),
            (f"{inner} is a directory", f"is_directory({f'{outer}/{inner}'!r})"),
        ),
    )


def write_file(draw: Draw) -> Step:
    name, word = f"{draw.name()}.txt", draw.name()
    return Step(
        say=f"Write {word} to {name}.",
        solve=(f"echo {word} > {name}",),
        checks=(made(name), holds(name, word)),
    )


def copy_file(draw: Draw) -> Step:
    source, copy = f"{draw.name()}.txt", f"{draw.name()}.txt"
    content = text_of(draw.lines(3))
    return Step(
        say=f"Copy {source} to {copy}.",
        solve=(f"cp {source} {copy}",),
        files={source: content},
        checks=(made(copy), holds(copy, content)),
    )


def rename_file(draw: Draw) -> Step:
    before, after = f"{draw.name()}.txt", f"{draw.name()}.txt"
    content = text_of(draw.lines(3))
    return Step(
        say=f"Rename {before} to {after}.",
        solve=(f"mv {before} {after}",),
        files={before: content},
        checks=((f"{before} is gone", f"is_gone({before!r})"), holds(after, content)),
    )


def remove_directory(draw: Draw) -> Step:
    lost, kept = draw.name(), draw.name()
    return Step(
        say=f"Remove the directory {lost} and the file {kept}.txt. Keep {kept}.md.",
        solve=(f"rm -r {lost} {kept}.txt",),
        files={f"{lost}/a.txt": text_of(draw.lines(1)), f"{kept}.txt": "x\n", f"{kept}.md": "y\n"},
        checks=(
            (f"{lost} is gone", f"is_gone({lost!r}) and text('{kept}.md') == 'y'"),
            (f"only {kept} md is left", f"is_gone('{kept}.txt') and text('{kept}.md') == 'y'"),
        ),
    )


def link_file(draw: Draw) -> Step:
    target, link = f"{draw.name()}.txt", draw.name()
    content = text_of(draw.lines(2))
    return Step(
        say=f"Make {link} a symbolic link to {target}.",
        solve=(f"ln -s {target} {link}",),
        files={target: content},
        checks=(
            (f"{link} leads to {target}", f"is_link_to({link!r}, {target!r})"),
            holds(link, content),
        ),
    )


def turn_link(draw: Draw) -> Step:
    before, after, link = f"{draw.name()}.txt", f"{draw.name()}.txt", draw.name()
    content = text_of(draw.lines(2))
    return Step(
        say=f"The link {link} leads to {before}. Make it lead to {after}.",
        solve=(f"ln -sf {after} {link}",),
        files={before: "old\n", after: content},
        setup=f"ln -s {before} {link}\n",
        checks=(
            (f"{link} leads to {after}", f"is_link_to({link!r}, {after!r})"),
            holds(link, content),
        ),
    )


def count_files(draw: Draw) -> Step:
    folder, output = draw.name(), f"{draw.name()}.txt"
    count = draw.rng.randint(3, 9)
    files = {f"{folder}/{'sub/' * (i % 2)}{draw.word()}{i}.md": "x\n" for i in range(count)}
    others = {f"{folder}/{draw.word()}{i}.dat": "x\n" for i in range(3)}
    return Step(
        say=f"Write how many .md files are below {folder} to {output}.",
        solve=(f"find {folder} -name '*.md' | wc -l > {output}",),
        files=files | others,
        checks=(made(output), holds(output, str(count))),
    )


def find_largest(draw: Draw) -> Step:
    folder, name, output = draw.name(), f"{draw.name()}.dat", f"{draw.name()}.txt"
    files = {f"{folder}/{draw.word()}{i}.dat": "x" * draw.rng.randint(1, 400) for i in range(5)}
    largest = {f"{folder}/{name}": "x" * draw.number(1000, 9000)}
    return Step(
        say=f"Write the name of the largest file in {folder} to {output}.",
        solve=(f"ls -S {folder} | head -n 1 > {output}",),
        files=files | largest,
        checks=(
            made(output),
            (f"{output} has the name", f"text({output!r}).split('/')[-1] == {name!r}"),
        ),
    )


def remove_by_name(draw: Draw) -> Step:
    folder, kept = draw.name(), draw.name()
    files = {f"{folder}/{kept}/{i}.tmp": "x\n" for i in range(draw.rng.randint(1, 4))}
    files |= {f"{folder}/{i}.tmp": "x\n" for i in range(draw.rng.randint(1, 4))}
    left = f"{folder}/{kept}.txt"
    gone = [
        " and ".join(f"is_gone({n!r})" for n in files if (kept in n) == deep) for deep in (1, 0)
    ]
    return Step(
        say=f"Remove every .tmp file below {folder}, and keep {left}.",
        solve=(f"find {folder} -name '*.tmp' -delete",),
        files=files | {left: "keep\n"},
        checks=(
            (f"no tmp is in {kept}", f"is_file({left!r}) and {gone[0]}"),
            (f"no tmp is in {folder}", f"is_file({left!r}) and {gone[1]}"),
        ),
    )


def _mode_checks(name: str, mode: int) -> tuple[Check, ...]:
    return (
        (f"{name} is right for its owner", f"mode({name!r}) & 0o700 == {mode & 0o700:#o}"),
        (f"{name} is right for others", f"mode({name!r}) & 0o077 == {mode & 0o077:#o}"),
    )


def set_mode(draw: Draw) -> Step:
    name = f"{draw.name()}.txt"
    mode = draw.rng.choice((0o750, 0o755, 0o700, 0o711, 0o550, 0o500, 0o400, 0o440))
    return Step(
        say=f"Give {name} the mode {mode:o}.",
        solve=(f"chmod {mode:o} {name}",),
        files={name: text_of(draw.lines(1))},
        modes={name: 0o664},
        checks=_mode_checks(name, mode),
    )


def make_executable(draw: Draw) -> Step:
    script, secret = f"{draw.name()}.sh", f"{draw.name()}.key"
    return Step(
        say=f"Let everyone run {script}, and let only the owner read {secret}.",
        solve=(f"chmod a+x {script}", f"chmod go-rwx {secret}"),
        files={script: "#!/bin/sh\necho ok\n", secret: text_of(draw.lines(1))},
        modes={script: 0o644, secret: 0o644},
        checks=(
            (f"{script} runs", f"mode({script!r}) & 0o111 == 0o111"),
            (f"{secret} is private", f"mode({secret!r}) & 0o477 == 0o400"),
        ),
    )


def close_directory(draw: Draw) -> Step:
    folder = draw.name()
    names = [f"{folder}/{draw.word()}{index}.txt" for index in range(2)]
    return Step(
        say=f"Take every right on {folder} and all that is in it from group and others.",
        solve=(f"chmod -R go-rwx {folder}",),
        files={name: text_of(draw.lines(1)) for name in names},
        modes=dict.fromkeys(names, 0o644),
        checks=tuple(
            (f"{name} is private", f"mode({name!r}) & 0o477 == 0o400") for name in (folder, *names)
        ),
    )


def _tar(files: dict[str, str]) -> bytes:
    """A tar.gz whose bytes depend on its files alone."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


def pack(draw: Draw) -> Step:
    folder, archive = draw.name(), f"{draw.name()}.tar.gz"
    files = {f"{folder}/{draw.word()}{i}.txt": text_of(draw.lines(2)) for i in range(2)}
    return Step(
        say=f"Pack the directory {folder} into {archive}.",
        solve=(f"tar czf {archive} {folder}",),
        files=files,
        checks=tuple(
            (
                f"{archive} has {name}",
                f"unpacked({archive!r}).get({name!r}) == {content.rstrip()!r}",
            )
            for name, content in files.items()
        ),
    )


def unpack(draw: Draw) -> Step:
    archive, folder = f"{draw.name()}.tar.gz", draw.name()
    files = {f"{draw.word()}{i}.txt": text_of(draw.lines(2)) for i in range(2)}
    return Step(
        say=f"Unpack {archive} into the directory {folder}.",
        solve=(f"mkdir {folder}", f"tar xzf {archive} -C {folder}"),
        files={archive: _tar(files)},
        checks=tuple(holds(f"{folder}/{name}", content) for name, content in files.items()),
    )


def compress(draw: Draw) -> Step:
    name = f"{draw.name()}.txt"
    content = text_of(draw.lines(6))
    return Step(
        say=f"Compress {name} with gzip, so that only {name}.gz is left.",
        solve=(f"gzip {name}",),
        files={name: content},
        checks=(
            (f"{name} is packed", f"gunzipped('{name}.gz') == {content.rstrip()!r}"),
            (f"{name} is gone", f"is_gone({name!r})"),
        ),
    )


FILES = (make_directory, write_file, copy_file, rename_file, remove_directory)
LINKS = (link_file, turn_link)
FIND = (count_files, find_largest, remove_by_name)
PERMISSIONS = (set_mode, make_executable, close_directory)
ARCHIVES = (pack, unpack, compress)
