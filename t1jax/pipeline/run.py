"""`t1jax run CONFIG`: every stage of a run, one after the other, each once.

    check the config, the records, the disk -> stages that are not done -> the table

All stages work in this process. A run that was ended goes on where it was when the same command is
run again: finished stages are skipped, the one that had begun goes on from what it saved.
"""

import json
import signal
from pathlib import Path

from rich.console import Console
from rich.table import Table

from t1jax.config import Config
from t1jax.errors import Preempted
from t1jax.evaluation.figures.shared import duration, label
from t1jax.evaluation.run_folder import EVALUATED, Json
from t1jax.interrupts import Interrupted
from t1jax.pipeline.learning import keep_config, write_config
from t1jax.pipeline.run_checks import check, check_disk, tell
from t1jax.pipeline.run_plan import plan_of
from t1jax.pipeline.run_records import Records, Stage, alone_in
from t1jax.pipeline.run_stages import stages_of
from t1jax.pipeline.run_view import View

SUMMARY = Path("report", "summary.json")


def run(config: Config, *, redo: str = "") -> None:
    """`t1jax run`.

    Args:
      config: of the whole run.
      redo: a stage; what it and those after it made is removed first. Empty: none.

    Raises:
      UserError: the config cannot work, does not fit what is done, or a stage failed.
      Preempted: SIGTERM came; the same command goes on.
    """
    check(config)
    folder, stages = Path(config.run), stages_of(config)
    with alone_in(folder):
        records = Records(config, stages)
        if redo:
            print(f"removed what was made by: {', '.join(records.forget(redo))}")
        records.check()
        plan = plan_of(config, records.done)
        check_disk(config, plan)
        if len(records.done) < len(stages):
            print(tell(plan))
        if records.empty:
            keep_config(config)  # of commands that were run alone
        else:
            write_config(config)
        work_through(stages, records)
    conclude(folder, stages, records)


def work_through(stages: list[Stage], records: Records) -> None:
    """Does the stages that are not done, in one view.

    Raises:
      Preempted: SIGTERM came. Interrupted: Ctrl-C did.
    """
    done = {stage.name: records.seconds(stage) for stage in stages if records.finished(stage)}
    with View([stage.name for stage in stages], done) as view:
        for stage in stages:
            if stage.name in done:
                continue
            try:
                with view.running(stage.name), records.doing(stage):
                    stage.work()
            except (Interrupted, Preempted) as ended:
                raise _ended(stage, ended) from None


def _ended(stage: Stage, ended: Interrupted | Preempted) -> Interrupted | Preempted:
    """What a signal's end of a stage is to the whole run, which can always go on."""
    number = ended.number
    if number == signal.SIGINT:
        return Interrupted(number)
    return Preempted(
        f"a signal ended the run in stage {stage.name}: run the same command again to go on"
    )


# ---- what came of it -----------------------------------------------------------------------------


def conclude(folder: Path, stages: list[Stage], records: Records) -> None:
    """Prints the result, the seconds, and where to read more."""
    console = Console(highlight=False, soft_wrap=True)
    numbers = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    console.print(result(numbers))
    spent = {stage.name: records.seconds(stage) for stage in stages}
    told = ", ".join(f"{name} {duration(seconds)}" for name, seconds in spent.items())
    console.print(f"time: {told}; {duration(sum(spent.values()))} in all")
    console.print(f"report: {folder / 'report' / 'index.html'}")


def result(numbers: Json) -> Table:
    """base, SFT and PPO on the test split."""
    table = Table(title="Solved on the test split", title_justify="left")
    for name in ("", "pass@1", "95% interval", "mean fraction", "tasks × attempts", "broken"):
        table.add_column(name, justify="right" if name else "left")
    for name in EVALUATED:
        stage = numbers["stages"][name]
        if stage is not None:
            table.add_row(
                label(name), _share(stage["pass_at_1"]), _interval(stage["ci95"]),
                _share(stage["mean_fraction"]), f"{stage['tasks']} × {stage['attempts']}",
                str(stage["infra_failures"]),
            )  # fmt: skip
    paired = numbers["paired"]["ppo_minus_sft"]
    if paired is not None:
        table.add_section()
        cells = (f"{100 * paired['difference']:+.1f} points", _interval(paired["ci95"]))
        table.add_row("PPO less SFT, paired", *cells)
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _interval(ci95: list[float] | None) -> str:
    return "-" if ci95 is None else f"{100 * ci95[0]:.1f} to {100 * ci95[1]:.1f}"
