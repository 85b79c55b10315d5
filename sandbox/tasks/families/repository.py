"""Git: commits, branches, tags, lost files, merges."""

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Step, holds, text_of


def _history(repository: str, files: dict[str, str], message: str) -> str:
    """Shell that makes a repository whose only commit has these files."""
    writes = "".join(f"printf '%s\\n' {text!r} > {name}\n" for name, text in files.items())
    return f"""(
git init -q -b main {repository}
cd {repository}
{writes}git add .
git commit -q -m {message}
)
"""


def commit_all(draw: Draw) -> Step:
    repository, message = draw.name(), draw.name()
    files = {f"{draw.word()}{i}.txt": text_of(draw.lines(1)) for i in range(2)}
    return Step(
        say=f"Make {repository} a git repository and commit its files with the message {message}.",
        solve=(
            f"git init -q {repository}",
            f"git -C {repository} add .",
            f"git -C {repository} commit -q -m {message}",
        ),
        files={f"{repository}/{name}": content for name, content in files.items()},
        checks=(
            (
                f"the message is {message}",
                f"git({repository!r}, 'log', '-1', '--format=%s') == {message!r}",
            ),
            (
                "every file is in it",
                f"git({repository!r}, 'ls-tree', '-r', '--name-only', 'HEAD').split() == "
                f"{sorted(files)!r}",
            ),
        ),
    )


def commit_change(draw: Draw) -> Step:
    repository, message, first = draw.name(), draw.name(), draw.name()
    before, after = draw.name(), draw.name()
    setup = _history(repository, {"notes.txt": before}, first)
    setup += f"echo {after} > {repository}/notes.txt\n"
    return Step(
        say=f"Commit the change in the repository {repository} with the message {message}.",
        solve=(f"git -C {repository} commit -q -a -m {message}",),
        setup=setup,
        checks=(
            (
                f"the messages are {first} and {message}",
                f"git({repository!r}, 'log', '--format=%s').split() == {[message, first]!r}",
            ),
            (
                "the change is in it",
                f"git({repository!r}, 'show', 'HEAD:notes.txt') == {after!r}",
            ),
        ),
    )


def make_branch(draw: Draw) -> Step:
    repository, branch, message = draw.name(), draw.name(), draw.name()
    head = f"git({repository!r}, 'symbolic-ref', '--short', 'HEAD')"
    return Step(
        say=f"Make the branch {branch} in the repository {repository} and check it out.",
        solve=(f"git -C {repository} checkout -q -b {branch}",),
        setup=_history(repository, {"notes.txt": draw.word()}, message),
        checks=(
            (
                f"{branch} has the commit",
                f"git({repository!r}, 'log', '-1', '--format=%s', {branch!r}) == {message!r}",
            ),
            (f"{branch} is checked out", f"{head} == {branch!r}"),
        ),
    )


def make_tag(draw: Draw) -> Step:
    repository, tag, message, later = draw.name(), draw.name(), draw.name(), draw.name()
    setup = _history(repository, {"notes.txt": draw.word()}, message)
    setup += f"git -C {repository} commit -q --allow-empty -m {later}\n"
    return Step(
        say=f"Tag the first commit of the repository {repository} as {tag}.",
        solve=(f"git -C {repository} tag {tag} HEAD~1",),
        setup=setup,
        checks=(
            (f"{tag} is a tag", f"{tag!r} in git({repository!r}, 'tag').split()"),
            (
                f"{tag} is the first commit",
                f"git({repository!r}, 'log', '--format=%s', {tag!r}) == {message!r}",
            ),
        ),
    )


def restore_file(draw: Draw) -> Step:
    repository, lost, message, later = draw.name(), f"{draw.name()}.txt", draw.name(), draw.name()
    content = draw.name()
    setup = _history(repository, {lost: content, "notes.txt": draw.word()}, message)
    setup += f"git -C {repository} rm -q {lost}\ngit -C {repository} commit -q -m {later}\n"
    return Step(
        say=f"The last commit of the repository {repository} removed {lost}. Bring it back.",
        solve=(f"git -C {repository} checkout -q HEAD~1 {lost}",),
        setup=setup,
        checks=(
            (f"{lost} is back", f"is_file('{repository}/{lost}')"),
            holds(f"{repository}/{lost}", content),
        ),
    )


def merge_branch(draw: Draw) -> Step:
    repository, branch, message, later = draw.name(), draw.name(), draw.name(), draw.name()
    added = f"{draw.name()}.txt"
    setup = _history(repository, {"notes.txt": draw.word()}, message)
    setup += f"""git -C {repository} checkout -q -b {branch}
echo {draw.word()} > {repository}/{added}
git -C {repository} add {added}
git -C {repository} commit -q -m {later}
git -C {repository} checkout -q main
"""
    return Step(
        say=f"Merge the branch {branch} into main in the repository {repository}.",
        solve=(f"git -C {repository} merge -q {branch}",),
        setup=setup,
        checks=(
            (
                f"main has {added}",
                f"{added!r} in git({repository!r}, 'ls-tree', '--name-only', 'main').split()",
            ),
            (
                f"main has the commit {later}",
                f"{later!r} in git({repository!r}, 'log', '--format=%s', 'main').split()",
            ),
        ),
    )


GIT = (commit_all, commit_change, make_branch, make_tag, restore_file, merge_branch)
