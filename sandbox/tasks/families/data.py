"""Tables, documents and logs."""

import json

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Step, holds, made, one_line, text_of

LEVELS = ("INFO", "WARN", "ERROR")


def _table(draw: Draw) -> list[tuple[int, str, int]]:
    """Rows of id, name and price."""
    names = draw.items(draw.rng.randint(4, 7))
    return [(i, name, draw.number()) for i, name in enumerate(names, 1)]


def _csv(rows: list[tuple[int, str, int]]) -> str:
    return text_of(["id,name,price", *(f"{i},{name},{price}" for i, name, price in rows)])


def csv_column(draw: Draw) -> Step:
    source, output, rows = f"{draw.name()}.csv", f"{draw.name()}.txt", _table(draw)
    return Step(
        say=f"Write the names in {source}, without the header, to {output}.",
        solve=(f"tail -n +2 {source} | cut -d, -f2 > {output}",),
        files={source: _csv(rows)},
        checks=(
            (f"{output} has {len(rows)} lines", f"len(lines({output!r})) == {len(rows)}"),
            holds(output, text_of([name for _, name, _ in rows])),
        ),
    )


def csv_sum(draw: Draw) -> Step:
    source, output, rows = f"{draw.name()}.csv", f"{draw.name()}.txt", _table(draw)
    return Step(
        say=f"Write the sum of the prices in {source} to {output}.",
        solve=(f"awk -F, 'NR>1{{s+=$3}} END{{print s}}' {source} > {output}",),
        files={source: _csv(rows)},
        checks=(one_line(output), holds(output, str(sum(price for _, _, price in rows)))),
    )


def csv_filter(draw: Draw) -> Step:
    source, output, rows = f"{draw.name()}.csv", f"{draw.name()}.csv", _table(draw)
    limit = sorted(price for _, _, price in rows)[len(rows) // 2]
    kept = [row for row in rows if row[2] > limit]
    return Step(
        say=f"Write the header and the rows of {source} with a price above {limit} to {output}.",
        solve=(f"awk -F, 'NR==1||$3>{limit}' {source} > {output}",),
        files={source: _csv(rows)},
        checks=(
            (f"{output} has a header", f"lines({output!r})[0] == 'id,name,price'"),
            (f"{output} has the rows", f"lines({output!r})[1:] == {_csv(kept).split()[1:]!r}"),
        ),
    )


def csv_lookup(draw: Draw) -> Step:
    source, output, rows = f"{draw.name()}.csv", f"{draw.name()}.txt", _table(draw)
    _, name, price = draw.rng.choice(rows)
    return Step(
        say=f"Write the price of {name} in {source} to {output}.",
        solve=(f"grep {name} {source} | cut -d, -f3 > {output}",),
        files={source: _csv(rows)},
        checks=(one_line(output), holds(output, str(price))),
    )


def _document(draw: Draw) -> dict[str, int]:
    return {name: draw.number() for name in draw.items(4)}


def json_value(draw: Draw) -> Step:
    source, output, fields = f"{draw.name()}.json", f"{draw.name()}.txt", _document(draw)
    key = draw.rng.choice(list(fields))
    read = f"import json; print(json.load(open('{source}'))['{key}'])"
    return Step(
        say=f"Write the value of {key} in {source} to {output}.",
        solve=(f'python3 -c "{read}" > {output}',),
        files={source: json.dumps(fields, indent=2) + "\n"},
        checks=(one_line(output), holds(output, str(fields[key]))),
    )


def json_make(draw: Draw) -> Step:
    output, key, value = f"{draw.name()}.json", draw.name(), draw.number()
    return Step(
        say=f"Write a JSON object to {output} in which {key} is {value}.",
        solve=(f"""echo '{{"{key}": {value}}}' > {output}""",),
        checks=(
            (f"{output} is JSON", f"isinstance(document({output!r}), dict)"),
            (f"{key} is {value}", f"document({output!r}) == {{{key!r}: {value}}}"),
        ),
    )


def json_change(draw: Draw) -> Step:
    name, fields, value = f"{draw.name()}.json", _document(draw), draw.number()
    key = draw.rng.choice(list(fields))
    changed = fields | {key: value}
    return Step(
        say=f"Set {key} to {value} in {name}. It must stay JSON.",
        solve=(f"""sed -i 's/"{key}": {fields[key]}/"{key}": {value}/' {name}""",),
        files={name: json.dumps(fields, indent=2) + "\n"},
        checks=(
            (f"{key} is {value}", f"document({name!r}).get({key!r}) == {value}"),
            ("nothing else changed", f"document({name!r}) == {changed!r}"),
        ),
    )


def json_keys(draw: Draw) -> Step:
    source, output, fields = f"{draw.name()}.json", f"{draw.name()}.txt", _document(draw)
    read = f"import json; print(*sorted(json.load(open('{source}'))), sep='\\n')"
    return Step(
        say=f"Write the sorted keys of {source} to {output}, one on each line.",
        solve=(f'python3 -c "{read}" > {output}',),
        files={source: json.dumps(fields) + "\n"},
        checks=(
            (f"{output} has 4 lines", f"len(lines({output!r})) == 4"),
            holds(output, text_of(sorted(fields))),
        ),
    )


def _log(draw: Draw) -> list[tuple[str, str, str]]:
    """Entries of level, source and text, with every level among them."""
    sources = draw.items(3)
    levels = [*LEVELS, *(draw.rng.choice(LEVELS) for _ in range(draw.rng.randint(8, 20)))]
    draw.rng.shuffle(levels)
    return [(level, draw.rng.choice(sources), draw.word()) for level in levels]


def _log_text(entries: list[tuple[str, str, str]]) -> str:
    return text_of([f"{i:04d} {' '.join(entry)}" for i, entry in enumerate(entries)])


def log_count(draw: Draw) -> Step:
    source, output, entries = f"{draw.name()}.log", f"{draw.name()}.txt", _log(draw)
    level = draw.rng.choice(LEVELS)
    count = sum(entry[0] == level for entry in entries)
    return Step(
        say=f"Write how many {level} lines {source} has to {output}.",
        solve=(f"grep -c {level} {source} > {output}",),
        files={source: _log_text(entries)},
        checks=(made(output), holds(output, str(count))),
    )


def log_sources(draw: Draw) -> Step:
    source, output, entries = f"{draw.name()}.log", f"{draw.name()}.txt", _log(draw)
    found = sorted({name for level, name, _ in entries if level == "ERROR"})
    return Step(
        say=f"Word 3 of each line of {source} is its source. "
        f"Write each source of an ERROR line once to {output}, sorted.",
        solve=(f"grep ERROR {source} | cut -d' ' -f3 | sort -u > {output}",),
        files={source: _log_text(entries)},
        checks=(
            (f"{output} has {len(found)} lines", f"len(lines({output!r})) == {len(found)}"),
            holds(output, text_of(found)),
        ),
    )


def log_last(draw: Draw) -> Step:
    source, output, entries = f"{draw.name()}.log", f"{draw.name()}.txt", _log(draw)
    level = draw.rng.choice(LEVELS)
    last = [line for line in _log_text(entries).splitlines() if level in line][-1]
    return Step(
        say=f"Write the last {level} line of {source} to {output}.",
        solve=(f"grep {level} {source} | tail -n 1 > {output}",),
        files={source: _log_text(entries)},
        checks=(one_line(output), holds(output, last)),
    )


CSV = (csv_column, csv_sum, csv_filter, csv_lookup)
JSON = (json_value, json_make, json_change, json_keys)
LOGS = (log_count, log_sources, log_last)
