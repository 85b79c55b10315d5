"""Small programs: mending Python, writing shell scripts. Judged by inputs the agent never saw."""

from collections.abc import Callable, Mapping

from sandbox.tasks.draw import Draw
from sandbox.tasks.step import Step

Function = Callable[[int, int], object]

# What the function must return; its body; the piece of it that is right, and what stands instead.
BUGS = (
    ("the sum of a and b", "a + b", "a + b", "a - b"),
    ("the product of a and b", "a * b", "a * b", "a + b"),
    ("the larger of a and b", "max(a, b)", "max(", "min("),
    ("the rest of a divided by b", "a % b", "a % b", "a // b"),
    ("whether a is less than b", "a < b", "a < b", "a > b"),
    ("the sum of the numbers from a to a + 9", "sum(range(a, a + 10))", "a + 10", "a + 9"),
)


def _evaluated(body: str) -> Function:
    """The function that a body of BUGS makes."""
    function: Function = eval(f"lambda a, b: {body}")
    return function


def _nothing(a: int, b: int) -> object:
    return ""


def _judged(
    draw: Draw,
    name: str,
    run: str,
    right: Function,
    *,
    say: str,
    solve: str,
    wrong: Function = _nothing,
    files: Mapping[str, str] | None = None,
) -> Step:
    """A step judged by two runs on hidden numbers for which the program is wrong at first."""
    collect, checks = {}, []
    for turn in ("first", "second"):
        a, b = draw.number(), draw.number()
        while right(a, b) == wrong(a, b):
            a, b = draw.number(), draw.number()
        output = f"{name}_{turn}"
        collect[output] = run.format(a=a, b=b)
        promise = f"{name} is right the {turn} time"
        checks.append((promise, f"text('.checks/{output}') == {str(right(a, b))!r}"))
    return Step(say=say, solve=(solve,), files=files or {}, collect=collect, checks=tuple(checks))


def mend_function(draw: Draw) -> Step:
    module, function = draw.name(), draw.name()
    meaning, body, right, wrong = draw.rng.choice(BUGS)
    broken = body.replace(right, wrong)
    return _judged(
        draw,
        module,
        f"python3 -c 'from {module} import {function}; print({function}({{a}}, {{b}}))'",
        _evaluated(body),
        wrong=_evaluated(broken),
        say=f"The function {function} in {module}.py must return {meaning}. Mend it.",
        solve=f"sed -i 's|{wrong}|{right}|' {module}.py",
        files={f"{module}.py": f"def {function}(a, b):\n    return {broken}\n"},
    )


def mend_name(draw: Draw) -> Step:
    module, before, after = draw.name(), draw.name(), draw.name()
    factor = draw.number(10, 99)
    return _judged(
        draw,
        module,
        f"echo {{a}} | python3 {module}.py",
        lambda a, b: a * factor,
        say=f"{module}.py fails since it uses {before}, which is called {after}. Mend it.",
        solve=f"sed -i 's/{before}/{after}/' {module}.py",
        files={f"{module}.py": f"{after} = {factor}\n\nprint(int(input()) * {before})\n"},
    )


def mend_syntax(draw: Draw) -> Step:
    module, term = draw.name(), draw.number(10, 99)
    broken = f"import sys\n\nif len(sys.argv) == 2\n    print(int(sys.argv[1]) + {term})\n"
    return _judged(
        draw,
        module,
        f"python3 {module}.py {{a}}",
        lambda a, b: a + term,
        say=f"{module}.py has a syntax error in line 3. Mend it.",
        solve=f"sed -i '3s/$/:/' {module}.py",
        files={f"{module}.py": broken},
    )


def script_arithmetic(draw: Draw) -> Step:
    name, factor = draw.name(), draw.number(10, 99)
    return _judged(
        draw,
        name,
        f"bash {name}.sh {{a}}",
        lambda a, b: a * factor,
        say=f"Write the script {name}.sh. It prints its first argument times {factor}.",
        solve=f"echo 'echo $(($1 * {factor}))' > {name}.sh",
    )


def script_greeting(draw: Draw) -> Step:
    name, word = draw.name(), draw.name()
    return _judged(
        draw,
        name,
        f"bash {name}.sh {{a}}",
        lambda a, b: f"{word} {a}",
        say=f"Write the script {name}.sh. It prints {word}, a space and its first argument.",
        solve=f"""echo 'echo "{word} $1"' > {name}.sh""",
    )


def script_larger(draw: Draw) -> Step:
    name = draw.name()
    return _judged(
        draw,
        name,
        f"bash {name}.sh {{a}} {{b}}",
        lambda a, b: max(a, b),
        say=f"Write the script {name}.sh. It prints the larger of its two arguments.",
        solve=f"echo 'if [ $1 -gt $2 ]; then echo $1; else echo $2; fi' > {name}.sh",
    )


def script_count(draw: Draw) -> Step:
    name = draw.name()
    return _judged(
        draw,
        name,
        f"seq {{a}} | bash {name}.sh",
        lambda a, b: a,
        say=f"Write the script {name}.sh. It prints how many lines its standard input has.",
        solve=f"echo 'wc -l' > {name}.sh",
    )


PYTHON = (mend_function, mend_name, mend_syntax)
SCRIPT = (script_arithmetic, script_greeting, script_larger, script_count)
