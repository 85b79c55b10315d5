"""Trajectories of other systems: ATIF both ways, Harbor's RolloutDetail, routes of vLLM and SGLang.

ATIF (Harbor's trajectory.json, versions 1.0 to 1.8) holds messages, and per agent step what the
policy saw and said as ids with log-probs. Each step's prompt meets the stream so far by the four
boundary rules, so reading back what `to_atif` wrote gives the same ids, masks and log-probs.
Routes travel beside them, as engines return them. Plain dicts in and out; knows nothing of files.
"""

import base64
import binascii
import dataclasses
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t1jax import __version__
from t1jax.errors import UserError
from t1jax.trajectory import routes
from t1jax.trajectory.boundary import Language, common_prefix
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.record import (
    Chunk,
    Ending,
    Finish,
    LogprobKind,
    RouteShape,
    Sampling,
    Trajectory,
    Turn,
)
from t1jax.trajectory.recorder import Recorder

ATIF = "ATIF-v1.8"
ATIF_VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
Json = dict[str, Any]
Routes = tuple[np.ndarray, np.ndarray]  # ids [T, L, C] in the smallest type, recorded [T]

# ---- engines' routes ----------------------------------------------------------------------------


def from_vllm(response: Mapping[str, Any], shape: RouteShape, *, choice: int = 0) -> Routes:
    """Routes of a vLLM completion, row 0 being the prompt's first token.

    `prompt_routed_experts` [prompt, L, K] stands in the response, `routed_experts` in the choice;
    either as nested lists or as base64 of a .npy file. A row for the last token may be there.
    """
    chosen = response["choices"][choice]
    parts = [response.get("prompt_routed_experts"), chosen.get("routed_experts")]
    decoded = [_vllm_array(part, shape) for part in parts if part is not None]
    if not decoded:
        raise UserError("the response of vLLM has no routed_experts; start it with "
                        "--enable-return-routed-experts")  # fmt: skip
    return routes.split_missing(np.concatenate(decoded), shape.experts)


def from_sglang(meta_info: Mapping[str, Any], shape: RouteShape) -> Routes:
    """Routes of an SGLang generation: base64 of int32 [tokens - 1, L, K], prompt included.

    With `routed_experts_start_len` in the request the first row is that token's; pass it on to
    `Recorder.record_routes`.
    """
    payload = meta_info.get("routed_experts")
    if payload is None:
        raise UserError(
            "the response of SGLang has no routed_experts; start it with "
            "--enable-return-routed-experts and ask with return_routed_experts"
        )
    raw = np.frombuffer(_base64(payload), np.uint8)
    row = shape.layers * shape.chosen * 4
    if row == 0 or len(raw) % row:
        raise UserError(f"routed_experts of SGLang hold {len(raw)} bytes; expected a multiple of "
                        f"{row}: {shape.layers} layers x {shape.chosen} choices x 4")  # fmt: skip
    ids = raw.view("<i4").reshape(-1, shape.layers, shape.chosen)
    return routes.split_missing(ids, shape.experts)


def to_sglang(chunk: Chunk) -> Json:
    """A chunk's routes as SGLang returns them; rows that were not recorded are -1."""
    ids = np.where(chunk.recorded[:, None, None], chunk.routes.astype("<i4"), -1).astype("<i4")
    return {"routed_experts": base64.b64encode(ids.tobytes()).decode()}


def _vllm_array(part: Any, shape: RouteShape) -> np.ndarray:
    try:
        if isinstance(part, str):
            array = np.load(io.BytesIO(_base64(part)), allow_pickle=False)
        else:
            array = np.asarray(part)
    except (ValueError, EOFError) as error:
        raise UserError(f"routed_experts of vLLM cannot be read: {error}") from None
    if array.ndim != 3 or array.shape[1:] != (shape.layers, shape.chosen):
        raise UserError(f"routed_experts of vLLM have shape {list(array.shape)}; expected "
                        f"[tokens, {shape.layers}, {shape.chosen}]")  # fmt: skip
    if array.dtype.kind not in "iu":
        raise UserError(f"routed_experts of vLLM are {array.dtype}; expected integers")
    return array


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise UserError(f"routed_experts are no base64: {error}") from None


# ---- ATIF out -----------------------------------------------------------------------------------


def to_atif(
    trajectory: Trajectory,
    chat: Chat,
    *,
    session_id: str,
    model_name: str = "",
    routed: bool = False,
) -> Json:
    """The trajectory as ATIF, every turn with the ids of its prompt and completion.

    Prompts are whole, as ATIF means them, so the size grows with the square of the turns.

    Args:
      session_id: names the trial.
      model_name: of the policy.
      routed: add each chunk's routes, SGLang's form, under its last step's extra.
    """
    steps: list[Json] = []
    for number, chunk in enumerate(trajectory.chunks):
        steps += _chunk_steps(chunk, chat, copied=number > 0)
        if routed and steps[-1]["source"] == "agent":
            steps[-1].setdefault("extra", {}).update(
                to_sglang(chunk.truncated(chunk.turns[-1].end))
            )
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    agent: Json = {"name": "t1jax", "version": __version__}
    if model_name:
        agent["model_name"] = model_name
    ending, first = trajectory.ending, trajectory.chunks[0]
    return {
        "schema_version": ATIF,
        "session_id": session_id,
        "agent": agent,
        "steps": steps,
        "final_metrics": _final_metrics(trajectory, len(steps)),
        "extra": {
            "task": ending.task, "outcome": ending.outcome, "reward": ending.reward,
            "timings": dict(ending.timings), "boundaries": trajectory.boundaries,
            "logprob_kind": str(first.logprob_kind), "sampling": dataclasses.asdict(first.sampling),
        },
    }  # fmt: skip


def _final_metrics(trajectory: Trajectory, steps: int) -> Json:
    turns = [turn for chunk in trajectory.chunks for turn in chunk.turns]
    return {
        "total_prompt_tokens": sum(turn.sampled for turn in turns),
        "total_completion_tokens": sum(turn.end - turn.sampled for turn in turns),
        "total_steps": steps,
    }


def _chunk_steps(chunk: Chunk, chat: Chat, *, copied: bool) -> Iterator[Json]:
    """Messages before each turn, then the turn, whose tool results are its observation."""
    agent: Json | None = None
    for number, turn in enumerate(chunk.turns):
        given = chat.messages_of(chunk.ids[turn.begin : turn.sampled])
        if agent is not None:
            yield _observed(agent, given)
        # The last is the header of the turn; an assistant's before it was not sampled here.
        for role, text in given[:-1]:
            if role != "tool":
                old = (copied and number == 0) or role == "assistant"
                source = "agent" if role == "assistant" else role
                yield {"source": source, "message": text} | (
                    {"is_copied_context": True} if old else {}
                )
        agent = _agent_step(chunk, turn, chat, number)
    if agent is not None:
        yield _observed(agent, chat.messages_of(chunk.ids[chunk.turns[-1].end :]))


def _observed(step: Json, given: Sequence[tuple[str, str]]) -> Json:
    """An agent's step with the results of its calls."""
    texts = [text for role, text in given if role == "tool"]
    calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
    results = [
        ({"source_call_id": call} if call else {}) | {"content": text}
        for call, text in itertools.zip_longest(calls[: len(texts)], texts)
    ]
    return step | ({"observation": {"results": results}} if results else {})


def _agent_step(chunk: Chunk, turn: Turn, chat: Chat, number: int) -> Json:
    completion = chunk.ids[turn.sampled : turn.end]
    said = chat.parse(completion, thinking=_is_thinking(chunk.ids[turn.begin : turn.sampled], chat))
    step: Json = {"source": "agent", "message": said.content}
    if said.reasoning:
        step["reasoning_content"] = said.reasoning
    if said.calls:
        step["tool_calls"] = [
            {"tool_call_id": f"call_{number}_{i}", "function_name": call.name,
             "arguments": dict(call.arguments)}
            for i, call in enumerate(said.calls)
        ]  # fmt: skip
    step["metrics"] = {
        "prompt_tokens": turn.sampled,
        "completion_tokens": len(completion),
        "prompt_token_ids": chunk.ids[: turn.sampled].tolist(),
        "completion_token_ids": completion.tolist(),
        "logprobs": [float(x) for x in chunk.logprobs[turn.sampled : turn.end]],
        "extra": {
            "finish": str(turn.finish),
            "version": int(chunk.versions[turn.end - 1]),
        },
    }
    return step


def _is_thinking(prompt: np.ndarray, chat: Chat) -> bool:
    """Whether the header that ends this prompt leaves the reasoning open."""
    starts = np.flatnonzero(prompt == chat.start)
    return "</think>" not in chat.decode(prompt[starts[-1] :]) if len(starts) else False


# ---- ATIF and RolloutDetail in ------------------------------------------------------------------


def from_atif(document: Mapping[str, Any], language: Language, shape: RouteShape) -> Trajectory:
    """A trajectory from ATIF whose agent steps carry ids and log-probs.

    Steps that are copied context, or that called no model, are passed over: they are not sampled.

    Raises:
      UserError: another schema, a step without ids, counts that disagree.
    """
    version = document.get("schema_version")
    if version not in ATIF_VERSIONS:
        raise UserError(f"schema_version is {version!r}; expected one of {ATIF_VERSIONS[0]} to "
                        f"{ATIF_VERSIONS[-1]}")  # fmt: skip
    recorder = _recorder(document.get("extra") or {}, shape)
    for number, step in enumerate(document["steps"], start=1):
        copied = step.get("is_copied_context") or step.get("llm_call_count") == 0
        if step["source"] != "agent" or copied:
            continue
        metrics = step.get("metrics") or {}
        facts = metrics.get("extra") or {}
        _follow(
            recorder, language, f"step {number}", metrics, step.get("extra") or {},
            version=facts.get("version", 0), finish=facts.get("finish", ""),
        )  # fmt: skip
    return recorder.finish(_ending(document))


def from_rollout_detail(
    detail: Mapping[str, Any], language: Language, shape: RouteShape, ending: Ending
) -> Trajectory:
    """A trajectory from Harbor's RolloutDetail: per turn the whole prompt, completion, log-probs.

    `extra.routed_experts`, where there, holds SGLang's payload for each turn.
    """
    lists = [detail[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs")]
    if len(set(map(len, lists))) != 1:
        raise UserError(f"RolloutDetail has {', '.join(str(len(x)) for x in lists)} turns of "
                        "prompts, completions and logprobs; expected equal counts")  # fmt: skip
    routed = (detail.get("extra") or {}).get("routed_experts") or [None] * len(lists[0])
    recorder = Recorder(shape)
    for number, (prompt, completion, logprobs, payload) in enumerate(
        zip(*lists, routed, strict=True)
    ):
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion,
                   "logprobs": logprobs}  # fmt: skip
        extra = {} if payload is None else {"routed_experts": payload}
        _follow(recorder, language, f"turn {number}", metrics, extra, version=0, finish="")
    return recorder.finish(ending)


def _follow(
    recorder: Recorder, language: Language, where: str, metrics: Mapping[str, Any],
    extra: Mapping[str, Any], *, version: int, finish: str,
) -> None:  # fmt: skip
    """One turn: its prompt meets the stream, its completion goes on."""
    needed = ("prompt_token_ids", "completion_token_ids", "logprobs")
    absent = [name for name in needed if metrics.get(name) is None]
    if absent:
        raise UserError(f"{where} has no {absent[0]}; a trajectory for training needs the ids and "
                        "log-probs of every model call")  # fmt: skip
    prompt, completion, logprobs = (metrics[name] for name in needed)
    count = metrics.get("completion_tokens", len(completion))
    if not len(completion) == len(logprobs) == count:
        raise UserError(f"{where} has {len(completion)} completion ids, {len(logprobs)} logprobs "
                        f"and says {count} completion tokens; expected equal counts")  # fmt: skip
    read, ids = np.array(prompt, np.int32), np.array(completion, np.int32)
    recorder.follow(read, language)
    ended = len(ids) > 0 and int(ids[-1]) in language.ends
    recorder.append_sampled(
        ids, np.array(logprobs, np.float32), version=version,
        finish=Finish(finish) if finish else Finish.stop if ended else Finish.length,
    )  # fmt: skip
    if "routed_experts" in extra:
        _place_routes(recorder, read, ids, from_sglang(extra, recorder.shape))


def _place_routes(recorder: Recorder, read: np.ndarray, sampled: np.ndarray, found: Routes) -> None:
    """Records routes of the tokens that an engine read, where the stream holds the same ones.

    After rules 2 and 3 the two differ in the middle: rows there stay missing.
    """
    ids, recorded = found
    together = np.concatenate([read, sampled])
    if not len(together) - 1 <= len(ids) <= len(together):
        raise UserError(f"routed_experts have {len(ids)} rows for {len(together)} tokens; expected "
                        f"{len(together) - 1}")  # fmt: skip
    same = min(common_prefix(together, recorder.stream), len(ids))
    recorder.record_routes(0, ids[:same], recorded[:same])
    if same < len(ids):
        shift = len(recorder) - len(together)
        first = len(read)
        recorder.record_routes(first + shift, ids[first:], recorded[first:])


def _recorder(extra: Mapping[str, Any], shape: RouteShape) -> Recorder:
    return Recorder(
        shape,
        sampling=Sampling(**extra.get("sampling", {})),
        logprob_kind=LogprobKind(extra.get("logprob_kind", "raw")),
    )


def _ending(document: Mapping[str, Any]) -> Ending:
    extra = document.get("extra") or {}
    return Ending(
        task=extra.get("task") or document.get("session_id") or "unknown",
        outcome=extra.get("outcome", "unknown"),
        reward=extra.get("reward"),
        timings=extra.get("timings", {}),
    )
