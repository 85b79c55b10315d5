"""`t1jax report` of a whole run, of parts of one, of hostile output; in a real browser."""

import contextlib
import io
import json
import re
import shutil

import numpy as np
import pytest

from t1jax.checkpoint.init_tiny import SIZES, train_tokenizer
from t1jax.errors import UserError
from t1jax.evaluation import excerpts
from t1jax.evaluation.compare import compare
from t1jax.evaluation.report import report
from t1jax.evaluation.run_folder import read_run
from t1jax.trajectory.chat import Chat
from t1jax.trajectory.io import load_trajectory, save_trajectory
from t1jax.trajectory.recorder import Recorder

from .browser import Browser
from .made import HOSTILE, LONG, SHAPE, make_run, say, write_config, write_evaluation

FIGURES = (
    "pass_at_1", "composition", "reward", "outcomes", "explained_variance", "sft_loss", "gap",
    "ablation", "replay_rate", "expert_load", "seconds", "step_seconds",
)  # fmt: skip


@pytest.fixture(scope="module")
def chat():
    return Chat(train_tokenizer(SIZES["tiny"].vocab))


@pytest.fixture(scope="module")
def run(tmp_path_factory, chat):
    """A made run with its report."""
    folder = make_run(tmp_path_factory.mktemp("report") / "run", chat)
    report(folder)
    return folder


def page_of(folder):
    return (folder / "report" / "index.html").read_text()


# ---- numbers -------------------------------------------------------------------------------------


def test_the_summary_has_the_numbers_of_the_run_s_own_files(run):
    told = json.loads((run / "report" / "summary.json").read_text())
    assert set(told) == {"stages", "paired", "mismatch", "critic", "seconds"}
    for name in ("base", "sft", "ppo"):
        evaluated = json.loads((run / "evaluation" / name / "summary.json").read_text())
        stage = told["stages"][name]
        assert set(stage) == {"pass_at_1", "ci95", "mean_fraction", "tasks", "attempts",
                              "infra_failures"}  # fmt: skip
        assert stage["pass_at_1"] == evaluated["pass_at_1"]
        assert stage["mean_fraction"] == evaluated["mean_fraction"]["value"]
        lines = (run / "evaluation" / name / "results.jsonl").read_text().splitlines()
        broken = sum('"infra_error"' in line for line in lines)
        assert (stage["tasks"], stage["attempts"], stage["infra_failures"]) == (200, 3, broken)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert told["critic"] == {"explained_variance": rows[-1]["explained_variance"]}
    interval = [2.7e-7 * 0.8, 2.7e-7 * 1.25]
    assert told["mismatch"]["tito_replay"] == {"abs_diff": 2.7e-7, "ci95": interval}
    assert told["seconds"]["ppo"] == 611.5 and next(iter(told["seconds"])) == "tasks"


def test_the_paired_difference_is_the_mean_over_tasks(run):
    means = []
    for name in ("sft", "ppo"):
        scores: dict[str, list[bool]] = {}
        for line in (run / "evaluation" / name / "results.jsonl").read_text().splitlines():
            played = json.loads(line)
            if played["solved"] is not None:
                scores.setdefault(played["task"], []).append(played["solved"])
        means.append(scores)
    differences = [np.mean(means[1][task]) - np.mean(means[0][task]) for task in means[0]]
    told = json.loads((run / "report" / "summary.json").read_text())["paired"]["ppo_minus_sft"]
    assert told["difference"] == pytest.approx(np.mean(differences))
    error = np.std(differences) / len(differences) ** 0.5  # the bootstrap's, without resampling
    assert told["ci95"] == pytest.approx(
        [np.mean(differences) - 1.96 * error, np.mean(differences) + 1.96 * error], abs=0.01
    )


def test_every_figure_is_in_the_page_and_beside_it(run):
    page = page_of(run)
    for name in FIGURES:
        assert f'<figure id="{name}">' in page
        assert (run / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "Not there" not in page
    assert sorted(path.name for path in run.iterdir() if path.name.startswith("report")) == [
        "report"
    ]


def test_the_page_says_how_often_the_test_split_was_read(tmp_path, run):
    assert "was read by 3 evaluations of this run (base, SFT, PPO), of 3 weights: once" in page_of(
        run
    )
    shutil.copytree(run / "evaluation", tmp_path / "evaluation")
    shutil.copytree(run / "evaluation" / "ppo", tmp_path / "evaluation" / "again")
    report(tmp_path)
    assert "(base, SFT, PPO, again), of 3 weights: some more than once." in page_of(tmp_path)


# ---- parts that are not there --------------------------------------------------------------------


def test_a_run_that_only_began_says_what_is_missing(tmp_path, run):
    young = tmp_path / "young"
    young.mkdir()
    write_config(young)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = "".join(line for line in lines if '"sft"' in line)
    (young / "metrics.jsonl").write_text(rows + '{"stage": "ppo", "st')  # a torn line
    shutil.copytree(run / "evaluation" / "base", young / "evaluation" / "base")
    report(young)
    page, told = page_of(young), json.loads((young / "report" / "summary.json").read_text())
    assert told["stages"]["sft"] is None and told["stages"]["base"]["tasks"] == 200
    assert told["paired"] == {"ppo_minus_sft": None} and told["seconds"] == {}
    assert told["critic"] == {"explained_variance": None}
    assert set(told["mismatch"].values()) == {None}
    for missing in (
        "the evaluation of PPO", "there is no mismatch.json; <code>t1jax mismatch</code> makes it",
        "there is no stages.jsonl; <code>t1jax run</code> writes it",
        "metrics.jsonl has no reward/mean of ppo yet; <code>t1jax ppo</code> makes it",
    ):  # fmt: skip
        assert missing in page
    assert '<figure id="sft_loss">' in page


def test_a_refused_headline_is_said_and_null(tmp_path, run):
    broken = tmp_path / "broken"
    shutil.copytree(run / "evaluation", broken / "evaluation")
    file = broken / "evaluation" / "ppo" / "summary.json"
    summary = json.loads(file.read_text()) | {"pass_at_1": None, "ci95": None, "refused": "too few"}
    file.write_text(json.dumps(summary))
    report(broken)
    told = json.loads((broken / "report" / "summary.json").read_text())
    assert told["stages"]["ppo"]["pass_at_1"] is None
    assert told["paired"]["ppo_minus_sft"] is None
    assert re.search(r"No headline</span> PPO: too few", page_of(broken))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("mismatch.json", '{"tito_live": {"abs_diff": 1}}', r"mismatch.json cannot be read \(Key"),
        ("stages.jsonl", "no json\n", r"stages.jsonl cannot be read \(JSONDecodeError"),
        ("config.yaml", "- a\n", "config.yaml holds no mapping"),
        ("evaluation/ppo/summary.json", "{}", "summary.json lacks pass_at_1"),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, file, content, message):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_a_folder_that_is_no_run_is_refused_and_left_alone(tmp_path):
    with pytest.raises(UserError, match="expected a run's folder"):
        report(tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- what tools printed --------------------------------------------------------------------------


def test_hostile_output_is_text(run):
    solved, *_ = excerpts.excerpts(read_run(run))
    assert solved.task == LONG and solved.tokens > 100_000
    given = solved.exchanges[1].given
    assert "\\x1b[31mred\\x1b[0m\\x07\\x00 <script>" in given and "\\u202egnp" in given
    assert len(given) < 1_000 and "characters …]" in given
    page = page_of(run)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    assert "&lt;script&gt;document.title=" in page and "onerror=alert(1)&gt;" in page
    assert len(page) < 400_000


def test_text_is_cut_and_half_surrogates_are_replaced():
    assert excerpts.cut("a" * 20 + "b" * 20, 10) == "aaaaa [… 30 characters …] bbbbb"
    assert excerpts.plain("\ud83d\x00") == "?\\x00"


def test_one_of_each_kind_with_its_masks_and_logprobs(run):
    told = {excerpt.kind: excerpt for excerpt in excerpts.excerpts(read_run(run))}
    assert [told[kind].passed for kind in ("solved", "partial", "failed")] == [3, 1, 0]
    exchange = told["partial"].exchanges[0]
    assert "".join(token.text for token in exchange.tokens).startswith("I count the lines first.")
    assert exchange.given.startswith("<|im_start|>user\nWrite the number of lines")
    assert exchange.mean == pytest.approx(np.mean([t.logprob for t in exchange.tokens]))
    assert [t.level for t in exchange.tokens] == [
        0 if t.logprob >= -0.1 else 1 if t.logprob >= -1 else 2 if t.logprob >= -3 else 3
        for t in exchange.tokens
    ]


# ---- two runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory, chat, run):
    """The same run with another PPO and clip; compared with it: its folder, what was said."""
    folder = tmp_path_factory.mktemp("compare") / "other"
    shutil.copytree(run, folder)
    write_config(folder, clip=0.1)
    shutil.rmtree(folder / "evaluation" / "ppo")
    write_evaluation(folder / "evaluation" / "ppo", "ppo", chat, 200, 3, seed=1)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        compare(run, folder)
    return folder, shown.getvalue()


def test_two_runs_are_tested_on_the_same_tasks(run, other):
    folder, told = other
    assert re.search(r"ppo.clip +│ 0.2 +│ 0.1", told) and "model.checkpoint" in told
    assert re.search(r"SFT +│ +200 │.*│ +\+0\.0 │.*│ +0 │ +0 │ +1 │", told)
    means = [
        json.loads((each / "evaluation" / "ppo" / "summary.json").read_text())["pass_at_1"]
        for each in (run, folder)
    ]
    points = f"{100 * (means[1] - means[0]):+.1f}"
    assert re.search(
        rf"PPO +│ +200 │ +70.3% │ +{100 * means[1]:.1f}% │ +{re.escape(points)} │", told
    )
    page = (folder / "compare" / "run" / "index.html").read_text()
    assert f"<strong>{points}</strong>" in page and '<td class="wrap">0.1</td>' in page
    assert page.count("<figure") == 7 and (folder / "compare/run/ppo_reward_mean.png").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda played: played["task"] == LONG, r"200 tasks and .* 199; 1 are only in the first.*"
         f"such as {LONG}"),
        (lambda played: played.update(category="x"), "has category archives in .* and x in"),
        (lambda played: played.update(total=9), "has assertions 3 in .* and 9 in"),
    ],
)  # fmt: skip
def test_other_tasks_are_refused(tmp_path, run, change, message):
    shutil.copytree(run / "evaluation", tmp_path / "evaluation")
    file = tmp_path / "evaluation" / "ppo" / "results.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [played for played in results if not change(played)]
    file.write_text("".join(json.dumps(played) + "\n" for played in kept))
    with pytest.raises(UserError, match=message):
        compare(run, tmp_path)
    assert not (tmp_path / "compare").exists()


def test_the_same_name_with_another_prompt_is_refused(tmp_path, run, chat):
    other = tmp_path / "other"
    for kept in ("evaluation", "config.yaml", "tokenizer.json"):
        copy = shutil.copytree if (run / kept).is_dir() else shutil.copy
        other.mkdir(exist_ok=True)
        copy(run / kept, other / kept)
    where = next((other / "evaluation" / "ppo").glob("*/trajectory"))
    recorder = Recorder(SHAPE)
    recorder.append_context(chat.opening([{"role": "user", "content": "Something else."}]))
    say(recorder, chat, "Yes", np.random.default_rng(0))
    ending = load_trajectory(where).ending
    shutil.rmtree(where)
    save_trajectory(recorder.finish(ending), where)
    with pytest.raises(UserError, match=r"reads otherwise in .*the same name, another task"):
        compare(run, other)


# ---- in a browser --------------------------------------------------------------------------------

# Text whose contrast with what lies behind it is below WCAG's 4.5 (3 for large text): the first
# few, each with its ratio. SVG text is filled, and lies on its figure's card.
CONTRAST = """(() => {
  const rgba = text => [...text.match(/[\\d.]+/g).map(Number), 1].slice(0, 4);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return [255, 255, 255, 1];
  };
  const low = [];
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement, style = getComputedStyle(node);
    if (!walk.currentNode.data.trim() || style.visibility === "hidden") continue;
    if (!node.getClientRects().length || node.closest(".unseen, .skip, style")) continue;
    const svg = node.closest("svg");
    const front = light(rgba(svg ? style.fill : style.color)), back = light(behind(node));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    seen += 1;
    if (ratio < (large ? 3 : 4.5)) low.push([ratio.toFixed(2), walk.currentNode.data.slice(0, 40)]);
  }
  return [seen, low.slice(0, 8)];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_readable_fits_and_asks_for_nothing(run, browser, width, scheme):
    browser.open(run / "report" / "index.html", width=width, scheme=scheme)
    assert browser.complaints == []
    assert {url.split(":")[0] for url in browser.requests} == {"file", "data"}
    assert len([url for url in browser.requests if url.startswith("file:")]) == 1
    assert browser.value("document.title") == "run: report of a run"
    assert browser.value("document.documentElement.scrollWidth") == width
    browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.value("document.documentElement.scrollWidth") == width
    seen, low = browser.value(CONTRAST)
    assert low == [] and seen > 300
    dark = browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"
    assert dark == (scheme == "dark")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_is_readable_and_fits_a_phone(other, browser, scheme):
    browser.open(other[0] / "compare" / "run" / "index.html", width=390, scheme=scheme)
    assert browser.complaints == [] and {u[:5] for u in browser.requests} <= {"file:", "data:"}
    assert browser.value("document.documentElement.scrollWidth") == 390
    seen, low = browser.value(CONTRAST)
    assert low == [] and seen > 100


@pytest.mark.browser
def test_the_page_can_be_heard(run, browser):
    browser.open(run / "report" / "index.html", width=1280, scheme="light")
    images = browser.value("[...document.querySelectorAll('svg')].map(e => e.ariaLabel)")
    assert len(images) == len(FIGURES) and all(images)
    assert "PPO 7" in images[0] and "95% interval" in images[0]
    assert browser.value("document.querySelectorAll('td').length") > 20
    assert browser.value("[...document.querySelectorAll('th')].every(e => e.scope)")
    assert browser.value("document.querySelectorAll('h1').length") == 1
    ids = browser.value("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.browser
def test_the_browser_would_have_seen_what_is_forbidden(tmp_path, browser):
    page = tmp_path / "bad.html"
    page.write_text(
        "<p style='color:#aaa;width:2000px'>pale <img src='http://127.0.0.1:9/x.png'></p>"
        "<script>console.error('no')</script>"
    )
    browser.open(page, width=390, scheme="light")
    assert any("no" in each for each in browser.complaints)
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert browser.value("document.documentElement.scrollWidth") > 390
    assert browser.value(CONTRAST)[1][0][1] == "pale "


def test_hostile_text_holds_what_it_is_meant_to():
    assert {"\x1b", "\x00", "\x9b", "\u202e", "<"} <= set(HOSTILE)
