"""`t1jax score`: the reference's numbers, whatever the batches, mesh or form of checkpoint."""

import contextlib
import io
import shutil
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from t1jax import cli
from t1jax import score as S
from t1jax.checkpoint.convert import convert
from t1jax.errors import UserError
from t1jax.progress import Progress
from t1jax.score.batches import arrange, padded_length

from .checkpoint import made
from .model import golden as G


def command(*arguments):
    """(exit status, stdout, stderr) of `t1jax score ARGUMENTS`, in this process."""
    shown, noted, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["t1jax", "score", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(noted):
            cli.main()
    except SystemExit as ended:
        return ended.code or 0, shown.getvalue(), noted.getvalue()
    finally:
        sys.argv = argv
    raise AssertionError("cli.main returned")


def scored(tmp_path, tensors, *options, checkpoint=G.FIXTURES / "ref-a"):
    """OUTPUT for these INPUT tensors, and the summary."""
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "in.st")
    status, shown, noted = command(checkpoint, tmp_path / "in.st", tmp_path / "out.st", *options)
    assert status == 0, noted
    assert not (tmp_path / "out.st.incomplete").exists()
    return load_file(tmp_path / "out.st"), shown


def refused(tmp_path, tensors, *options, checkpoint=G.FIXTURES / "ref-a"):
    """The last line of stderr; nothing is written."""
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "in.st")
    status, _, noted = command(checkpoint, tmp_path / "in.st", tmp_path / "out.st", *options)
    assert status == 1 and "Traceback" not in noted, noted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.st"]
    return noted.splitlines()[-1]


def tokens_of(name, dtype=np.int64):
    g = G.golden(name)
    return {"input_ids": g.tokens.astype(dtype), "lengths": g.mask.sum(axis=1).astype(dtype)}


def forced_of(name, dtype=np.int16):
    """With forced routes; -1 beyond the lengths, as OUTPUT has it."""
    g = G.golden(name)
    routes = np.moveaxis(g.forced, 0, 2)
    return tokens_of(name) | {
        "routed_experts": np.where(g.mask[..., None, None] > 0, routes, -1).astype(dtype)
    }


def check_against(out, name, logits, logprobs):
    g = G.golden(name)
    real = g.mask > 0
    assert out["logprobs"].dtype == np.float32
    np.testing.assert_allclose(out["logprobs"][real[:, 1:]], logprobs[real[:, 1:]], atol=1e-3)
    assert np.all(out["logprobs"][~real[:, 1:]] == 0)
    np.testing.assert_allclose(out["logits"][real], logits[real], atol=2e-3)
    assert np.all(out["logits"][~real] == 0) and out["logits"].dtype == np.float32


@pytest.mark.parametrize("name", ["ref-a", "ref-b"])
def test_live_scores_and_routes_are_the_reference_s(tmp_path, name):
    g = G.golden(name)
    out, _ = scored(tmp_path, tokens_of(name), "--logits", checkpoint=G.FIXTURES / name)
    check_against(out, name, g.logits, g.logprobs)
    real = g.mask > 0
    np.testing.assert_array_equal(out["routed_experts"][real], np.moveaxis(g.routes, 0, 2)[real])
    assert np.all(out["routed_experts"][~real] == -1)


@pytest.mark.parametrize("name", ["tiny-square", "ref-a"])
def test_replayed_scores_are_the_reference_s_under_forced_routes(tmp_path, name):
    g = G.golden(name)
    out, shown = scored(
        tmp_path, forced_of(name), "--replay", "--logits", checkpoint=G.FIXTURES / name
    )
    check_against(out, name, g.forced_logits, g.forced_logprobs)
    # Routes are those of the live router: not the forced ones, but for layer 0 the natural ones.
    real, natural = g.mask > 0, np.moveaxis(g.routes, 0, 2)
    np.testing.assert_array_equal(out["routed_experts"][real][:, 0], natural[real][:, 0])
    forced, live = np.sort(forced_of(name)["routed_experts"]), np.sort(out["routed_experts"])
    rate = (forced != live).any(axis=-1)[real].mean()
    assert rate > 0 and f"replay_replace_rate: {rate:.6f}" in shown


def test_replaying_live_routes_replaces_none_and_changes_nothing(tmp_path):
    live, _ = scored(tmp_path, tokens_of("ref-a"))
    routes = {"routed_experts": live["routed_experts"]}
    again, shown = scored(tmp_path, tokens_of("ref-a") | routes, "--replay")
    assert "replay_replace_rate: 0.000000" in shown
    np.testing.assert_allclose(again["logprobs"], live["logprobs"], atol=1e-5)
    np.testing.assert_array_equal(again["routed_experts"], live["routed_experts"])


def test_where_routes_are_missing_the_live_router_chooses(tmp_path):
    partial = np.load(G.FIXTURES / "ref-a" / "replay.npz")
    wanted = {k: partial[k] for k in partial.files if k.startswith("partial_")}
    routes = np.moveaxis(wanted["partial_forced_indices"], 0, 2).astype(np.int32)
    out, _ = scored(
        tmp_path, tokens_of("ref-a") | {"routed_experts": routes}, "--replay", "--logits"
    )
    check_against(out, "ref-a", wanted["partial_logits"], wanted["partial_token_logprobs"])


def test_a_missing_last_token_is_fine_and_changes_no_log_prob(tmp_path):
    tensors = forced_of("ref-a")
    whole, _ = scored(tmp_path, tensors, "--replay")
    last = tensors["lengths"] - 1
    tensors["routed_experts"][np.arange(len(last)), last] = -1
    out, shown = scored(tmp_path, tensors, "--replay", "--on-missing", "error")
    np.testing.assert_allclose(out["logprobs"], whole["logprobs"], atol=1e-5)
    recorded = (tensors["lengths"] - 1).sum() * tensors["routed_experts"].shape[2]
    assert f"of {recorded:,} recorded rows" in shown


def test_a_converted_checkpoint_scores_as_its_source(tmp_path):
    convert(G.FIXTURES / "ref-b", tmp_path / "converted", progress=Progress(io.StringIO()))
    theirs, _ = scored(tmp_path, tokens_of("ref-b"), checkpoint=G.FIXTURES / "ref-b")
    ours, _ = scored(tmp_path, tokens_of("ref-b"), checkpoint=tmp_path / "converted")
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("tensors", [tokens_of, forced_of])
def test_a_mesh_gives_what_one_device_gives(tmp_path, tensors):
    options = ["--replay"] if tensors is forced_of else []
    one, _ = scored(tmp_path, tensors("ref-a"), *options)
    # Twelve rows in each bucket: two batches of eight places, the second not full.
    times = lambda x: np.concatenate([x] * 6)  # noqa: E731
    tiled = {name: times(values) for name, values in tensors("ref-a").items()}
    many, _ = scored(
        tmp_path, tiled, *options, "--mesh", "data=2,expert=4", "--batch-tokens", "1"
    )
    assert G.relative(many["logprobs"], times(one["logprobs"])) < 1e-5
    np.testing.assert_allclose(many["logprobs"], times(one["logprobs"]), atol=1e-4)
    np.testing.assert_array_equal(many["routed_experts"], times(one["routed_experts"]))


def test_rows_keep_their_order_and_batches_do_not_matter(tmp_path):
    tensors = forced_of("ref-a")
    whole, _ = scored(tmp_path, tensors, "--replay", "--logits")
    order = np.array([2, 0, 3, 1, 0, 2, 3])
    shuffled = {name: values[order] for name, values in tensors.items()}
    for batch_tokens in (1, 400):
        out, _ = scored(
            tmp_path, shuffled, "--replay", "--logits", "--batch-tokens", str(batch_tokens)
        )
        for name in ("logprobs", "logits"):
            np.testing.assert_allclose(out[name], whole[name][order], atol=1e-4)
        np.testing.assert_array_equal(out["routed_experts"], whole["routed_experts"][order])


def test_bfloat16_is_near_float32_in_the_mean(tmp_path):
    exact, _ = scored(tmp_path, forced_of("ref-a"), "--replay")
    near, _ = scored(tmp_path, forced_of("ref-a"), "--replay", "--dtype", "bfloat16")
    real = G.golden("ref-a").mask[:, 1:] > 0
    difference = (near["logprobs"] - exact["logprobs"])[real]
    # Logits of this model spread by 4: a bfloat16's 2**-9 of that is 0.008 in each of many sums.
    assert 0 < np.abs(difference).mean() < 0.1
    assert abs(difference.mean()) < 0.02


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.uint64])
def test_input_may_have_any_integer_dtype(tmp_path, dtype):
    save_file({"input_ids": np.ones((2, 3), dtype), "lengths": np.array([3, 1], dtype),
               "routed_experts": np.tile(np.arange(2, dtype=dtype), (2, 3, 4, 1))},
              tmp_path / "in.st")  # fmt: skip
    config = G.model("ref-a")[0].config
    tokens = S.read_input(str(tmp_path / "in.st"), config, replay=True, on_missing="error")
    assert tokens.lengths.tolist() == [3, 1] and tokens.routes_of(0).shape == (3, 4, 2)


def test_what_lies_beyond_a_length_is_never_read(tmp_path):
    tensors = tokens_of("ref-a")
    plain, _ = scored(tmp_path, tensors)
    beyond = np.arange(tensors["input_ids"].shape[1]) >= tensors["lengths"][:, None]
    tensors["input_ids"][beyond] = -100
    out, _ = scored(tmp_path, tensors)
    np.testing.assert_array_equal(out["logprobs"], plain["logprobs"])


def test_a_row_without_tokens_scores_nothing(tmp_path):
    tensors = tokens_of("ref-a")
    tensors["lengths"][[0, 2]] = 0, 1
    out, shown = scored(tmp_path, tensors)
    assert np.all(out["logprobs"][[0, 2]] == 0) and np.all(out["logprobs"][1, :5] != 0)
    assert np.all(out["routed_experts"][0] == -1) and np.all(out["routed_experts"][2, 1:] == -1)
    assert np.all(out["routed_experts"][2, 0] >= 0)
    assert "rows: 4" in shown and f"over {130 + 16:,} tokens" in shown


def test_the_file_says_how_it_was_made(tmp_path):
    scored(tmp_path, tokens_of("ref-a"), "--mesh", "data=1")
    with safe_open(tmp_path / "out.st", "numpy") as file:
        metadata = file.metadata()
    assert metadata["checkpoint"] == str(G.FIXTURES / "ref-a")
    picked = {k: metadata[k] for k in ("dtype", "mesh", "replay", "t1jax")}
    assert picked == {
        "dtype": "float32", "mesh": "data=1", "replay": "false", "t1jax": cli.__version__
    }  # fmt: skip


# ---- programs ------------------------------------------------------------------------------------


def test_lengths_from_1000_to_1100_compile_two_programs(tmp_path, monkeypatch):
    checkpoint = made.write(tmp_path / "c", made.document(), made.random(made.document()))
    traced, bind = [], S.bind
    monkeypatch.setattr(S, "bind", lambda *a: traced.append(1) or bind(*a))
    lengths = np.random.default_rng(0).permutation(np.arange(1000, 1101, 5))
    tensors = {"input_ids": np.ones((len(lengths), 1100), np.uint8), "lengths": lengths}
    live, shown = scored(tmp_path, tensors, "--batch-tokens", "4096", checkpoint=checkpoint)
    assert len(traced) == 2 and "of 2 programs" in shown
    traced.clear()
    routes = {"routed_experts": live["routed_experts"]}
    options = ("--replay", "--batch-tokens", "4096")
    scored(tmp_path, tensors | routes, *options, checkpoint=checkpoint)
    assert len(traced) == 2


def test_padded_lengths_are_eight_a_doubling():
    assert [padded_length(n, 64) for n in (1, 64, 65, 1000, 1024, 1025, 1100, 2048, 2049)] == [
        64, 64, 128, 1024, 1024, 1152, 1152, 2048, 2304
    ]  # fmt: skip
    for unit in (64, 128, 192):
        sizes = np.array([padded_length(n, unit) for n in range(1, 40_000)])
        assert np.all(sizes >= np.arange(1, 40_000)) and np.all(sizes % unit == 0)
        assert len({n for n in sizes.tolist() if 16384 < n <= 32768}) <= 9


def test_every_row_is_in_one_batch_of_its_bucket_s_shape():
    lengths = np.random.default_rng(1).integers(0, 700, 200)
    buckets = arrange(lengths, batch_tokens=3000, row_parts=3, unit=64)
    rows = np.concatenate([members for bucket in buckets for members in bucket.batches])
    assert sorted(rows) == np.flatnonzero(lengths).tolist()
    assert len({bucket.size for bucket in buckets}) == len(buckets)
    for size, height, batches in buckets:
        assert height % 3 == 0 and (height * size <= 3000 or height == 3)
        assert all(0 < len(members) <= height for members in batches)
        assert all(np.all(lengths[members] <= size) for members in batches)


# ---- refusals ------------------------------------------------------------------------------------


def small(**changes):
    """Two rows of three tokens for ref-a (4 layers, top-2 of 8), with changes; None removes."""
    tensors = {
        "input_ids": np.arange(6).reshape(2, 3),
        "lengths": np.array([3, 2]),
        "routed_experts": np.tile(np.arange(2, dtype=np.int16), (2, 3, 4, 1)),
    } | changes
    return {name: values for name, values in tensors.items() if values is not None}


def routes(*entries):
    """Routes of `small` with ids put at (row, token, layer)."""
    array = small()["routed_experts"]
    for place, ids in entries:
        array[place] = ids
    return array


REFUSALS = {
    "no lengths": ({"lengths": None}, "has no lengths; it holds"),
    "no routes": ({"routed_experts": None}, "has no routed_experts"),
    "float ids": ({"input_ids": np.ones((2, 3), np.float32)}, "input_ids has dtype F32"),
    "flat ids": ({"input_ids": np.arange(6)}, "input_ids has shape (6,); expected [B, S]"),
    "too few lengths": ({"lengths": np.array([3])}, "lengths has shape (1,); expected (2,)"),
    "too long": ({"lengths": np.array([3, 4])}, "row 1 has length 4; input_ids has room for 0..3"),
    "negative length": ({"lengths": np.array([-1, 2])}, "row 0 has length -1"),
    "only empty rows": ({"lengths": np.array([0, 0])}, "2 rows and no token in them"),
    "no rows": (
        {"input_ids": np.ones((0, 3), int), "lengths": np.ones(0, int),
             "routed_experts": np.ones((0, 3, 4, 2), int)},
        "0 rows and no token",
    ),
    "unknown token": (
        {"input_ids": np.array([[0, 1, 2], [3, 512, 5]])},
        "row 1, position 1 is token 512; the vocabulary has 0..511",
    ),
    "negative token": ({"input_ids": np.full((2, 3), -1)}, "row 0, position 0 is token -1"),
    "routes of another model": (
        {"routed_experts": np.zeros((2, 3, 8, 2), int)},
        "shape (2, 3, 8, 2); expected (2, 3, 4, 2)",
    ),
    "swapped axes": ({"routed_experts": np.zeros((2, 3, 2, 4), int)}, "axes are swapped"),
    "no row for last tokens": (
        {"routed_experts": np.zeros((2, 2, 4, 2), int)}, "add a row of -1 for each last token"
    ),
    "expert twice": (
        {"routed_experts": routes(((1, 0, 3), [5, 5]))},
        "row 1, token 0, layer 3 [5, 5] names an expert twice",
    ),
    "expert outside": (
        {"routed_experts": routes(((0, 2, 1), [0, 8]))},
        "row 0, token 2, layer 1 [0, 8] names an expert outside 0..7",
    ),
    "negative expert": ({"routed_experts": routes(((0, 2, 1), [0, -2]))}, "outside 0..7"),
    "partial": (
        {"routed_experts": routes(((1, 1, 2), [3, -1]))},
        "row 1, token 1, layer 2 [3, -1] holds -1 beside experts",
    ),
    "255, which was -1": (
        {"routed_experts": routes(((0, 0), 255)).astype(np.uint8)}, "outside 0..7"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_input_is_refused_by_name_and_place(tmp_path, case):
    changes, message = REFUSALS[case]
    line = refused(tmp_path, small(**changes), "--replay")
    assert line.startswith(f"error: {tmp_path / 'in.st'}") and message in line


def test_missing_routes_are_refused_when_asked_but_for_last_tokens(tmp_path):
    missing = routes(((0, 2), -1), ((1, 1), -1), ((0, 1, 3), -1))
    line = refused(tmp_path, small(routed_experts=missing), "--replay", "--on-missing", "error")
    assert "row 0, token 1, layer 3 [-1, -1] is missing; --on-missing live" in line


def test_routes_without_replay_are_said_to_be_unused(tmp_path):
    save_file(small(), tmp_path / "in.st")
    _, _, noted = command(G.FIXTURES / "ref-a", tmp_path / "in.st", tmp_path / "out.st")
    assert "routed_experts are not used without --replay" in noted


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("data=16", "needs 16 devices; 8 are present; on CPU set XLA_FLAGS=--xla_force_host_"
         "platform_device_count=16"),
        ("expert=3", "'experts' has size 8, which the mesh splits in 3"),
        ("rows=2", "'rows=2' is not AXIS=SIZE"),
    ],
)  # fmt: skip
def test_a_mesh_that_does_not_fit_is_refused(tmp_path, mesh, message):
    assert message in refused(tmp_path, small(), "--mesh", mesh)


@pytest.mark.parametrize("content", [b"", b"not a tensor", b"\x00" * 64, None])
def test_an_unreadable_input_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "in.st").write_bytes(content)
    status, _, noted = command(G.FIXTURES / "ref-a", tmp_path / "in.st", tmp_path / "out.st")
    assert status == 1 and "Traceback" not in noted
    assert noted.startswith(f"error: {tmp_path / 'in.st'} is no readable safetensors file: ")


def test_a_truncated_input_is_refused(tmp_path):
    save_file(small(), tmp_path / "in.st")
    (tmp_path / "in.st").write_bytes((tmp_path / "in.st").read_bytes()[:-1])
    status, _, noted = command(G.FIXTURES / "ref-a", tmp_path / "in.st", tmp_path / "out.st")
    assert status == 1 and "is no readable safetensors file" in noted


def test_places_that_cannot_be_written_are_refused(tmp_path):
    save_file(small(), tmp_path / "in.st")
    score = lambda output: S.score(str(G.FIXTURES / "ref-a"), str(tmp_path / "in.st"), str(output))  # noqa: E731
    for output, message in (
        (tmp_path, "expected a file in an existing directory"),
        (tmp_path / "no" / "out.st", "expected a file in an existing directory"),
        (tmp_path / "in.st", "is the input"),
    ):
        with pytest.raises(UserError, match=message):
            score(output)


def test_a_checkpoint_that_is_none_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "c").mkdir()
    save_file(small(), tmp_path / "in.st")
    status, _, noted = command(tmp_path / "c", tmp_path / "in.st", tmp_path / "out.st")
    assert status == 1 and f"{tmp_path / 'c'} is no checkpoint" in noted
    shutil.copy(G.FIXTURES / "ref-a" / "config.json", tmp_path / "c")
    status, _, noted = command(tmp_path / "c", tmp_path / "in.st", tmp_path / "out.st")
    assert status == 1 and f"{tmp_path / 'c'} is no checkpoint" in noted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "in.st"]


@pytest.mark.parametrize(
    "change", [{"batch_tokens": 0}, {"on_missing": "skip"}, {"dtype": "float16"}]
)
def test_arguments_are_checked(tmp_path, change):
    save_file(small(), tmp_path / "in.st")
    with pytest.raises((UserError, ValueError), match=next(iter(change))):
        S.score(
            str(G.FIXTURES / "ref-a"), str(tmp_path / "in.st"), str(tmp_path / "out.st"), **change
        )


def test_not_a_number_is_an_error_and_writes_nothing(tmp_path):
    checkpoint = tmp_path / "nan"
    shutil.copytree(G.FIXTURES / "tiny-square", checkpoint)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("layers.1.mlp.gate.weight"))
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, file)
    inside = tmp_path / "inside"
    inside.mkdir()
    said = refused(inside, tokens_of("tiny-square"), checkpoint=checkpoint)
    assert "log-prob of row 0, token 1 is not a number" in said


def test_replay_without_a_recorded_row_says_so(tmp_path):
    none = {"routed_experts": np.full_like(forced_of("tiny-square")["routed_experts"], -1)}
    _, shown = scored(
        tmp_path, tokens_of("tiny-square") | none, "--replay",
        checkpoint=G.FIXTURES / "tiny-square",
    )  # fmt: skip
    assert "no row is recorded; the live router chose everywhere" in shown
