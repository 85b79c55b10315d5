"""Lines of text: search, edit, count, sort, transform."""

from collections.abc import Callable

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Step, holds, made, one_line, text_of


def find_lines(draw: Draw) -> Step:
    source, output, key = f"{draw.name()}.txt", f"{draw.name()}.txt", draw.name()
    hits = [f"{line} {key}" for line in draw.lines(draw.rng.randint(2, 5))]
    found = draw.mixed(hits, draw.lines(8))
    kept = [line for line in found if key in line]
    return Step(
        say=f"Write the lines of {source} that contain {key} to {output}.",
        solve=(f"grep {key} {source} > {output}",),
        files={source: text_of(found)},
        checks=(
            (f"{output} has {len(kept)} lines", f"len(lines({output!r})) == {len(kept)}"),
            holds(output, text_of(kept)),
        ),
    )


def find_file(draw: Draw) -> Step:
    folder, name, output, key = draw.name(), f"{draw.name()}.txt", f"{draw.name()}.txt", draw.name()
    files = {f"{folder}/{draw.word()}{i}.txt": text_of(draw.lines(3)) for i in range(4)}
    return Step(
        say=f"One file in {folder} contains {key}. Write its name to {output}.",
        solve=(f"grep -l {key} {folder}/* > {output}",),
        files=files | {f"{folder}/{name}": text_of([*draw.lines(2), key])},
        checks=(
            one_line(output),
            (f"{output} names the file", f"text({output!r}).split('/')[-1] == {name!r}"),
        ),
    )


def count_hits(draw: Draw) -> Step:
    source, output, key = f"{draw.name()}.txt", f"{draw.name()}.txt", draw.name()
    count = draw.rng.randint(2, 9)
    found = draw.mixed([f"{key} {line}" for line in draw.lines(count)], draw.lines(10 - count))
    return Step(
        say=f"Write how many lines of {source} contain {key} to {output}.",
        solve=(f"grep -c {key} {source} > {output}",),
        files={source: text_of(found)},
        checks=(made(output), holds(output, str(count))),
    )


def replace_word(draw: Draw) -> Step:
    name, before, after = f"{draw.name()}.txt", draw.name(), draw.name()
    found = draw.mixed([f"{line} {before}" for line in draw.lines(3)], draw.lines(4))
    content = text_of(found).replace(before, after)
    return Step(
        say=f"Replace every {before} by {after} in {name}.",
        solve=(f"sed -i 's/{before}/{after}/g' {name}",),
        files={name: text_of(found)},
        checks=(
            (f"{before} is gone", f"len(lines({name!r})) > 1 and {before!r} not in text({name!r})"),
            holds(name, content),
        ),
    )


def delete_lines(draw: Draw) -> Step:
    name, key = f"{draw.name()}.txt", draw.name()
    found = draw.mixed([f"{line} {key}" for line in draw.lines(2)], draw.lines(5))
    content = text_of([line for line in found if key not in line])
    return Step(
        say=f"Delete the lines of {name} that contain {key}.",
        solve=(f"sed -i '/{key}/d' {name}",),
        files={name: text_of(found)},
        checks=(
            (f"{key} is gone", f"len(lines({name!r})) > 1 and {key!r} not in text({name!r})"),
            holds(name, content),
        ),
    )


def append_line(draw: Draw) -> Step:
    name, line = f"{draw.name()}.txt", draw.name()
    before = draw.lines(3)
    return Step(
        say=f"Add the line {line} at the end of {name}.",
        solve=(f"echo {line} >> {name}",),
        files={name: text_of(before)},
        checks=(
            (f"{line} is last", f"lines({name!r})[-1] == {line!r}"),
            holds(name, text_of([*before, line])),
        ),
    )


def insert_first(draw: Draw) -> Step:
    name, line = f"{draw.name()}.txt", draw.name()
    before = draw.lines(3)
    return Step(
        say=f"Add the line {line} before the first line of {name}.",
        solve=(f"sed -i '1i {line}' {name}",),
        files={name: text_of(before)},
        checks=(
            (f"{line} is first", f"lines({name!r})[0] == {line!r}"),
            holds(name, text_of([line, *before])),
        ),
    )


def count_lines(draw: Draw) -> Step:
    source, output, count = f"{draw.name()}.txt", f"{draw.name()}.txt", draw.number(20, 120)
    return Step(
        say=f"Write the number of lines of {source} to {output}.",
        solve=(f"wc -l < {source} > {output}",),
        files={source: text_of(draw.lines(count))},
        checks=(made(output), holds(output, str(count))),
    )


def sort_lines(draw: Draw) -> Step:
    source, output = f"{draw.name()}.txt", f"{draw.name()}.txt"
    names = draw.items(6)
    return Step(
        say=f"Sort the lines of {source} into {output}.",
        solve=(f"sort {source} > {output}",),
        files={source: text_of(names)},
        checks=(
            (f"{output} has every line", f"set(lines({output!r})) == {set(names)!r}"),
            holds(output, text_of(sorted(names))),
        ),
    )


def largest_number(draw: Draw) -> Step:
    source, output = f"{draw.name()}.txt", f"{draw.name()}.txt"
    numbers = [draw.number(100, 9999) for _ in range(8)]
    return Step(
        say=f"Write the largest number in {source} to {output}.",
        solve=(f"sort -n {source} | tail -n 1 > {output}",),
        files={source: text_of([str(number) for number in numbers])},
        checks=(one_line(output), holds(output, str(max(numbers)))),
    )


def distinct_lines(draw: Draw) -> Step:
    source, output = f"{draw.name()}.txt", f"{draw.name()}.txt"
    names = draw.items(3)
    found = draw.mixed(names, [draw.rng.choice(names) for _ in range(5)])
    return Step(
        say=f"Write each different line of {source} once to {output}, sorted.",
        solve=(f"sort -u {source} > {output}",),
        files={source: text_of(found)},
        checks=(
            (f"{output} has 3 lines", f"len(lines({output!r})) == 3"),
            holds(output, text_of(sorted(names))),
        ),
    )


Change = Callable[[list[str]], list[str]]


def _transformed(draw: Draw, say: str, command: str, change: Change) -> Step:
    source, output = f"{draw.name()}.txt", f"{draw.name()}.txt"
    before = [*draw.lines(4), draw.name()]
    after = change(before)
    return Step(
        say=say.format(source=source, output=output),
        solve=(f"{command.format(source=source)} > {output}",),
        files={source: text_of(before)},
        checks=(
            (f"{output} has {len(after)} lines", f"len(lines({output!r})) == {len(after)}"),
            holds(output, text_of(after)),
        ),
    )


def upper_case(draw: Draw) -> Step:
    say = "Write {source} in upper case to {output}."
    return _transformed(draw, say, "tr a-z A-Z < {source}", lambda a: [x.upper() for x in a])


def reverse_order(draw: Draw) -> Step:
    say = "Write the lines of {source} in reverse order to {output}."
    return _transformed(draw, say, "tac {source}", lambda a: a[::-1])


def put_before(draw: Draw) -> Step:
    word = draw.name()
    say = f"Write the lines of {{source}}, each with {word} and a space before it, to {{output}}."
    return _transformed(
        draw, say, f"sed 's/^/{word} /' {{source}}", lambda a: [f"{word} {x}" for x in a]
    )


def first_words(draw: Draw) -> Step:
    say = "Write the first word of each line of {source} to {output}."
    return _transformed(draw, say, "cut -d' ' -f1 {source}", lambda a: [x.split()[0] for x in a])


def last_lines(draw: Draw) -> Step:
    count = draw.rng.randint(2, 4)
    say = f"Write the last {count} lines of {{source}} to {{output}}."
    return _transformed(draw, say, f"tail -n {count} {{source}}", lambda a: a[-count:])


SEARCH = (find_lines, find_file, count_hits)
EDIT = (replace_word, delete_lines, append_line, insert_first)
COUNT = (count_lines, sort_lines, largest_number, distinct_lines)
TRANSFORM = (upper_case, reverse_order, put_before, first_words, last_lines)
