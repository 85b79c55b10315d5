"""One scheduler on several hosts: process 0 takes the requests, and all make the same decisions.

Each round process 0 sends the commands that came to it to the others, through the key-value store
that `jax.distributed` runs anyway; every process then obeys the same list in the same order, calls
the same programs, and so keeps equal slots, queues and kept streams (`rounds` depends on nothing
else). Weights never travel here: every process calls `swap` with its part of them.

A round costs the followers one wait on the store. A process that does not hear from process 0 for
`timeout_s` fails, and its requests with it. Not covered: another leader when process 0 is lost.
"""

import itertools
import pickle

import jax
from jax._src import distributed

from t1jax.errors import UserError
from t1jax.sampling.scheduler import Command

KEPT = 4096  # rounds that a process may be behind process 0; results are waited for, so it is few

_schedulers = itertools.count()  # every process makes its schedulers in the same order


class Hosts:
    """A Link between the processes of `jax.distributed`."""

    def __init__(self, *, timeout_s: float = 600.0):
        client = distributed.global_state.client
        if client is None:
            raise UserError("jax.distributed is not initialised; call it first on every host")
        self._client = client
        self.leads = jax.process_index() == 0
        self._timeout_ms = int(1000 * timeout_s)
        self._name = f"t1jax/scheduler/{next(_schedulers)}"
        self._rounds = itertools.count()

    def share(self, commands: list[Command]) -> list[Command]:
        """The commands of process 0, on every process."""
        number = next(self._rounds)
        key = f"{self._name}/{number}"
        if not self.leads:
            return _read(self._client.blocking_key_value_get_bytes(key, self._timeout_ms))
        self._client.key_value_set_bytes(key, pickle.dumps(commands))
        if number >= KEPT:
            self._client.key_value_delete(f"{self._name}/{number - KEPT}")
        return commands


def _read(sent: bytes) -> list[Command]:
    commands: list[Command] = pickle.loads(sent)
    return commands
