"""Everything a stage needs to go on where it was, saved as one step that counts only when whole.

    states = TrainStates(folder, keep_last=3, keep_best=1, min_free_mb=2048)
    found = states.restore({"actor": abstract_learner, "critic": ...})     # or None: nothing saved
    states.save(12, {"actor": learner, "critic": ...}, facts, score=0.4)   # writes in background
    states.close()                                                         # waits

    FOLDER/12/actor, FOLDER/12/critic, ...   trees of arrays, each process writes its own shards
    FOLDER/12/facts                          JSON: counters, the data's position, names of the trees

Trees are restored onto whatever mesh the abstract ones are for. Knows nothing of what trees mean.
"""

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as managers

from t1jax.checkpoint.tensor_files import is_local
from t1jax.errors import UserError

FACTS = "facts"
TREES = "trees"  # in the facts: which trees a whole step has
DAMAGED = "damaged-"
SCORE = "score"


class Restored(NamedTuple):
    """What a saved step held."""

    step: int
    trees: dict[str, Any]
    facts: dict[str, Any]


class TrainStates:
    """The saved steps of one stage. Every process makes the same calls."""

    def __init__(
        self,
        folder: epath.PathLike,
        *,
        keep_last: int,
        keep_best: int,
        min_free_mb: int,
        every: int = 1,
    ):
        """Opens the folder, or makes it.

        Args:
          folder: of the stage.
          keep_last: steps that are kept besides the best.
          keep_best: by their score.
          min_free_mb: below this nothing is saved.
          every: the schedule; of its steps the last `keep_last` are kept whatever signals made a
            stage save between them, so that what is there at the end does not depend on signals.
        """
        self._folder = epath.Path(folder)
        self._min_free_mb = min_free_mb
        self._folder.mkdir(parents=True, exist_ok=True)
        best = managers.BestN(
            get_metric_fn=lambda metrics: metrics[SCORE],
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(
                    [
                        managers.LatestN(keep_last),
                        managers.EveryNSteps(every, True, keep_last),
                        best,
                    ]
                ),
                cleanup_tmp_directories=True,  # of a save that was killed
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def latest(self) -> int | None:
        """The last step that was saved, or is being saved."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        trees: Mapping[str, Any],
        facts: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> None:
        """Copies the trees to the host and returns; they are written in the background.

        Args:
          step: not saved before.
          trees: by name; they may be donated as soon as this returns.
          facts: plain values that JSON holds.
          score: the best steps by it are kept besides the last ones; None: not among them.

        Raises:
          UserError: the disk would have less than `min_free_mb` left. Nothing is written then.
        """
        self._refuse_full_disk(trees)
        arguments = {name: ocp.args.PyTreeSave(tree) for name, tree in trees.items()}
        document = {**facts, TREES: sorted(trees)}
        self._manager.save(
            step,
            args=ocp.args.Composite(**arguments, **{FACTS: ocp.args.JsonSave(document)}),
            metrics=None if score is None else {SCORE: score},
            force=True,
        )

    def restore(self, abstract: Mapping[str, Any]) -> Restored | None:
        """The last whole step, each array where its abstract form says; None if none was saved.

        Steps that lack a tree, or cannot be read, are passed over with a warning and set aside
        under another name.

        Raises:
          UserError: steps were saved and none can be read.
        """
        reasons: list[str] = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            reason = self._lacks(step, abstract)
            if not reason:
                try:
                    found = self._read(step, abstract)
                except (OSError, ValueError, KeyError) as error:
                    reason = str(error).splitlines()[0][:300]
                else:
                    self._set_aside_after(step, reasons)
                    return found
            reasons.append(f"step {step}: {reason}")
        if reasons:
            raise UserError(
                f"{self._folder} holds saved steps, and none can be read: {'; '.join(reasons)}. "
                "Remove the folder to start over"
            )
        return None

    def read(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        """One saved step.

        Raises:
          UserError: it is not there, or not whole.
        """
        lacks = self._lacks(step, abstract)
        if lacks:
            known = sorted(self._manager.all_steps())
            raise UserError(f"{self._folder}: step {step}: {lacks}; saved are {known}")
        return self._read(step, abstract)

    def facts(self, step: int) -> dict[str, Any]:
        """The plain values of a saved step."""
        return json.loads((self._folder / str(step) / FACTS / "metadata").read_text())

    def wait(self) -> None:
        """Returns when what was saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for what is being written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _read(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        arguments = {
            name: ocp.args.PyTreeRestore(
                item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            for name, tree in abstract.items()
        }
        found = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        facts = self.facts(step)
        facts.pop(TREES)
        return Restored(step, {name: found[name] for name in abstract}, facts)

    def _lacks(self, step: int, abstract: Mapping[str, Any]) -> str:
        """Why a step is not whole, or an empty text."""
        try:
            saved = self.facts(step)[TREES]
        except (OSError, ValueError, KeyError):
            return "its facts are missing or damaged"
        absent = [n for n in saved if not (self._folder / str(step) / n / "_METADATA").exists()]
        if absent:
            return f"{', '.join(absent)} missing"
        unsaved = sorted(set(abstract) - set(saved))
        return f"it holds {saved}, not {unsaved}" if unsaved else ""

    def _set_aside_after(self, step: int, reasons: list[str]) -> None:
        """Renames later steps: their numbers will be saved again."""
        if not reasons:
            return
        warnings.warn(
            f"{self._folder}: going on from step {step}; later ones are not whole "
            f"({'; '.join(reasons)}) and now begin with {DAMAGED!r}",
            stacklevel=3,
        )
        if jax.process_index() == 0:
            for later in [s for s in self._manager.all_steps() if s > step]:
                aside = self._folder / f"{DAMAGED}{later}"
                aside.rmtree(missing_ok=True)
                (self._folder / str(later)).rename(aside)
        self._manager.reload()

    def _refuse_full_disk(self, trees: Mapping[str, Any]) -> None:
        if not is_local(self._folder):
            return
        needed_mb = sum(map(_local_bytes, jax.tree.leaves(dict(trees)))) / 1e6
        free_mb = shutil.disk_usage(os.fspath(self._folder)).free / 1e6
        if free_mb - needed_mb < self._min_free_mb:
            raise UserError(
                f"{self._folder} has {free_mb:.0f} MB free; saving needs {needed_mb:.0f} MB and "
                f"checkpoints.min_free_mb={self._min_free_mb} have to stay: free some space and "
                "run the same command again, it goes on from the last saved step"
            )


def _local_bytes(leaf: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in leaf.addressable_shards if shard.replica_id == 0)
