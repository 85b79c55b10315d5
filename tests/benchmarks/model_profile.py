"""Where our time goes: the program's own instructions, by the function that they were written in.

    python tests/benchmarks/model_profile.py forward|train|decode16|decode1 [--lines]

Traces a few runs with jax's profiler and sums each instruction's own time (without those inside
it), by the innermost line of t1jax/model that XLA recorded for it. Not a benchmark: tracing slows
small instructions and a fusion counts for its last line, so read shares, not times.
"""

import argparse
import collections
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import model_ours

TASKS = {
    "forward": model_ours.forward_task,
    "train": model_ours.train_task,
    "decode16": lambda: model_ours.decode_task(16),
    "decode1": lambda: model_ours.decode_task(1),
}
INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?([\w.\-]+) = .*metadata={([^}]*)}", re.M)


class Sources:
    """The tables of an optimised program's text that lead from an instruction to its source."""

    def __init__(self, text: str):
        self.files = self._table(text, "FileNames", r'"(.*)"')
        self.functions = self._table(text, "FunctionNames", r'"(.*)"')
        self.locations = self._table(
            text, "FileLocations", r"{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
        )
        self.frames = self._table(
            text, "StackFrames", r"{file_location_id=(\d+) parent_frame_id=(\d+)"
        )
        self.metadata = dict(INSTRUCTION.findall(text))

    @staticmethod
    def _table(text: str, title: str, entry: str) -> dict[str, tuple[str, ...]]:
        body = re.search(rf"^{title}\n(.*?)\n\n", text, re.M | re.S).group(1)
        return {number: found for number, *found in re.findall(rf"^(\d+) {entry}", body, re.M)}

    def place(self, instruction: str) -> tuple[str, str]:
        """('backward ' or '', innermost 'file:function:line' of the model)."""
        metadata = self.metadata.get(instruction, "")
        direction = "backward " if "transpose(" in metadata else ""
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        number = frame.group(1) if frame else "0"
        while number in self.frames:
            location, parent = self.frames[number]
            file, function, line = self.locations[location]
            path = self.files[file][0]
            if "t1jax/model/" in path:
                name = self.functions[function][0].replace("<locals>.", "")
                return direction, f"{Path(path).stem}:{name}:{line}"
            number = str(int(parent) - 1)
        return direction, f"(no source):{re.sub('[.0-9]+$', '', instruction)}:"


def own_times(trace: Path) -> tuple[collections.Counter, collections.Counter]:
    """Nanoseconds and events of every instruction, less the instructions that ran inside it."""
    times, counts = collections.Counter(), collections.Counter()
    profile = jax.profiler.ProfileData.from_file(str(next(trace.rglob("*.xplane.pb"))))
    for plane in profile.planes:
        for line in plane.lines:
            events = [
                (event.start_ns, event.start_ns + event.duration_ns, event.name)
                for event in line.events
                if any(key == "hlo_op" for key, _ in event.stats)
            ]
            _add_own(sorted(events, key=lambda event: (event[0], -event[1])), times, counts)
    return times, counts


def _add_own(events, times, counts) -> None:
    enclosing: list[tuple[float, str]] = []
    for start, end, name in events:
        while enclosing and enclosing[-1][0] <= start:
            enclosing.pop()
        times[name] += end - start
        counts[name] += 1
        if enclosing:
            times[enclosing[-1][1]] -= end - start
        enclosing.append((end, name))


def traced(task: model_ours.Task, runs: int):
    """Own times and events of each instruction, and where the program has them from."""
    for _ in range(2):
        task.before()
        task.run()
    task.before()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                task.run()
        return *own_times(Path(folder)), Sources(program_text())


def program_text() -> str:
    """The optimised program that ran: the largest that the client holds."""
    programs = jax.devices()[0].client.live_executables()
    return max((program.hlo_modules()[0].to_string() for program in programs), key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--lines", action="store_true", help="by line, not by function")
    chosen = parser.parse_args()
    times, counts, sources = traced(TASKS[chosen.task](), chosen.runs)
    by_place, events = collections.Counter(), collections.Counter()
    for name, nanoseconds in times.items():
        direction, place = sources.place(name)
        key = direction + (place if chosen.lines else place.rsplit(":", 1)[0])
        by_place[key] += nanoseconds
        events[key] += counts[name]
    total = sum(by_place.values())
    print(f"{chosen.task}: {total / 1e9 / chosen.runs:.3f} s of instructions a run")
    for key, nanoseconds in by_place.most_common(45):
        milliseconds = nanoseconds / 1e6 / chosen.runs
        print(f"{nanoseconds / total:6.1%} {milliseconds:9.2f} ms {events[key]:>8}  {key}")


if __name__ == "__main__":
    main()
