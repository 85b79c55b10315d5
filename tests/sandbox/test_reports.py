"""Reports of verifiers, honest, broken and forged: what is counted, and as what."""

import json
import os
from pathlib import Path

import pytest

from sandbox import reports
from sandbox.reports import Source, Status
from sandbox.verify import DISAGREEMENT, Baseline, Outcome, judge

FIVE = Baseline(oracle_passed=frozenset("abcde"), nop_passed=frozenset("ab"))


def ctrf(*tests, **summary):
    """A CTRF document of (name, status) pairs; `summary` overrides what it says of itself."""
    counts = {
        "tests": len(tests),
        "passed": sum(status == "passed" for _, status in tests),
        "failed": sum(status == "failed" for _, status in tests),
    }
    listed = [{"name": name, "status": status, "duration": 1} for name, status in tests]
    return json.dumps({"results": {"summary": counts | summary, "tests": listed}})


def judged(tmp_path, baseline=None, **files):
    """The verdict on a directory with these files; `_` in a name stands for the dot."""
    for name, content in files.items():
        path = tmp_path / name.replace("_", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return judge(reports.read(tmp_path), baseline)


ALL = [(name, "passed") for name in "abcde"]
SOME = [("a", "passed"), ("b", "passed"), ("c", "passed"), ("d", "failed"), ("e", "failed")]


def test_ctrf_counts_each_test(tmp_path):
    verdict = judged(tmp_path, ctrf_json=ctrf(*SOME), reward_txt="0")
    assert (verdict.outcome, len(verdict.passed), verdict.total) == (Outcome.partial, 3, 5)
    assert (verdict.reward("fraction"), verdict.reward("assertions")) == (3 / 5, 3 / 20)
    assert (verdict.reward("binary"), verdict.reward("fraction_bonus")) == (0, 3 / 5)


def test_gained_leaves_out_what_doing_nothing_passes(tmp_path):
    verdict = judged(tmp_path, FIVE, ctrf_json=ctrf(*SOME), reward_txt="0")
    assert verdict.gained == pytest.approx(1 / 3)
    lost = judged(tmp_path, FIVE, ctrf_json=ctrf(("a", "passed")), reward_txt="0")
    assert lost.gained == pytest.approx(-1 / 3)


def test_the_denominator_is_the_oracles(tmp_path):
    """Two of five tests still collect and pass: 2 of 5, not 2 of 2."""
    verdict = judged(tmp_path, FIVE, ctrf_json=ctrf(("c", "passed"), ("d", "passed")))
    assert (verdict.outcome, len(verdict.passed), verdict.total) == (Outcome.partial, 2, 5)
    assert verdict.flags == ("3 of the oracle's 5 assertions are missing",)


def test_assertions_that_the_oracle_did_not_have_earn_nothing(tmp_path):
    more = [(f"extra{index}", "passed") for index in range(50)]
    verdict = judged(tmp_path, FIVE, ctrf_json=ctrf(*SOME, *more), reward_txt="0")
    assert (len(verdict.passed), verdict.total) == (3, 5)


def test_a_name_that_occurs_twice_passes_only_if_it_passed_twice(tmp_path):
    twice = ctrf(("a", "failed"), ("a", "passed"), ("b", "passed"), ("b", "passed"))
    verdict = judged(tmp_path, ctrf_json=twice, reward_txt="0")
    assert (verdict.passed, verdict.total) == (frozenset("b"), 2)


@pytest.mark.parametrize("status", ["skipped", "pending", "other", "xfail"])
def test_only_passed_is_a_pass(tmp_path, status):
    verdict = judged(tmp_path, ctrf_json=ctrf(("a", "passed"), ("b", status)))
    assert (verdict.outcome, verdict.passed) == (Outcome.partial, frozenset("a"))


def test_skipped_tests_beside_a_reward_of_1_are_no_disagreement(tmp_path):
    """pytest ends with 0 when tests skip, so the usual test.sh writes 1."""
    tests = ctrf(("a", "passed"), ("b", "skipped"))
    verdict = judged(tmp_path, ctrf_json=tests, reward_txt="1")
    assert (verdict.outcome, len(verdict.passed)) == (Outcome.partial, 1)
    assert "1 assertions were skipped, which is no pass" in verdict.flags


def test_77_kb_of_stdout_inside_a_report_are_no_obstacle(tmp_path):
    fields = json.loads(ctrf(("a", "passed"), ("b", "failed")))
    fields["results"]["tests"][1]["stdout"] = ["é\x00\x1b[31m" * 11_000]
    verdict = judged(tmp_path, ctrf_json=json.dumps(fields), reward_txt="0")
    assert (verdict.outcome, len(verdict.passed), verdict.total) == (Outcome.partial, 1, 2)


@pytest.mark.parametrize(
    ("reward", "tests"),
    [
        ("1", SOME),  # a background writer of reward.txt
        ("0", ALL),
        ("0.6", ALL),
        ("1", [("a", "failed")]),
        ("nan", ALL),
        ("", ALL),
        ("1", [("a", "passed"), ("b", "other")]),
    ],
)
def test_a_reward_that_contradicts_the_report_fails(tmp_path, reward, tests):
    verdict = judged(tmp_path, ctrf_json=ctrf(*tests), reward_txt=reward)
    assert (verdict.outcome, verdict.passed) == (Outcome.failed, frozenset())
    assert DISAGREEMENT in verdict.flags


BROKEN = {
    "nothing at all": {},
    "no test collected": {"ctrf_json": ctrf(), "reward_txt": "0"},
    "no test collected, reward 1": {"ctrf_json": ctrf(), "reward_txt": "1"},
    "half a CTRF": {"ctrf_json": ctrf(*ALL)[:100], "reward_txt": "1"},
    "CTRF of another shape": {"ctrf_json": '{"results": [1]}', "reward_txt": "1"},
    "no summary": {"ctrf_json": '{"results": {"tests": []}}', "reward_txt": "1"},
    "a summary of more": {"ctrf_json": ctrf(*SOME, passed=5), "reward_txt": "1"},
    "CTRF of bytes": {"ctrf_json": b"\xff\xfe", "reward_txt": "1"},
    "deep CTRF": {"ctrf_json": "[" * 200_000},
    "NaN": {"reward_txt": "nan"},
    "infinity": {"reward_txt": "inf"},
    "too large": {"reward_txt": "1e999"},
    "empty": {"reward_txt": ""},
    "words": {"reward_txt": "reward=1"},
    "underscores": {"reward_txt": "1_0"},
    "two numbers": {"reward_txt": "1\n1\n"},
    "NaN in JSON": {"reward_json": '{"reward": NaN}'},
    "text in JSON": {"reward_json": '{"reward": "1"}'},
    "true in JSON": {"reward_json": '{"reward": true}'},
    "empty JSON": {"reward_json": "{}"},
    "a list": {"reward_json": "[1]"},
    "a huge whole number": {"reward_json": '{"a": 1' + "0" * 400 + "}"},
    "a summary of 1e999": {"ctrf_json": ctrf(*SOME).replace(": 5,", ": 1e999,"), "reward_txt": "1"},
    "a lone surrogate": {"ctrf_json": ctrf(("\ud800", "passed")), "reward_txt": "1"},
    "a broken reward.json beside a reward.txt": {"reward_json": "{", "reward_txt": "1"},
    "entities": {
        "junit_xml": '<!DOCTYPE x [<!ENTITY a "b">]><testsuite><testcase name="&a;"/></testsuite>',
        "reward_txt": "1",
    },
    "half a JUnit": {"junit_xml": "<testsuite><testcase", "reward_txt": "1"},
}


@pytest.mark.parametrize("files", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("baseline", [None, FIVE], ids=["alone", "audited"])
def test_a_report_that_cannot_be_counted_is_no_reward_0(tmp_path, files, baseline):
    verdict = judged(tmp_path, baseline, **files)
    assert (verdict.outcome, verdict.graded) == (Outcome.infra_error, False)
    assert verdict.flags
    with pytest.raises(ValueError, match="infra_error has no reward"):
        verdict.reward()


def test_a_pipe_or_a_link_as_report_is_not_read(tmp_path):
    (tmp_path / "ctrf.json").symlink_to("/dev/zero")
    (tmp_path / "reward.txt").symlink_to("/etc/hostname")
    assert judge(reports.read(tmp_path)).outcome == Outcome.infra_error


def test_junit_is_read_where_there_is_no_ctrf(tmp_path):
    junit = """<?xml version="1.0"?><testsuites><testsuite tests="4">
      <testcase classname="t" name="ok"/><testcase classname="t" name="bad"><failure/></testcase>
      <testcase classname="t" name="broken"><error/></testcase>
      <testcase classname="t" name="left"><skipped/></testcase></testsuite></testsuites>"""
    report = reports.read(_with(tmp_path, "report.xml", junit))
    assert report.source == Source.junit
    assert report.assertions == {
        "t::ok": Status.passed,
        "t::bad": Status.failed,
        "t::broken": Status.failed,
        "t::left": Status.skipped,
    }
    assert judged(tmp_path, reward_txt="1").outcome == Outcome.failed


def test_names_of_reward_json_are_assertions(tmp_path):
    rewards = '{"builds": 1, "fast": 0.5, "small": 0}'
    verdict = judged(tmp_path, reward_json=rewards, reward_txt="1")
    assert (verdict.source, verdict.outcome) == (Source.reward_json, Outcome.partial)
    assert (verdict.passed, verdict.total) == (frozenset({"builds"}), 3)
    assert verdict.rewards == {"builds": 1.0, "fast": 0.5, "small": 0.0}


@pytest.mark.parametrize(
    ("text", "outcome"), [("1", "solved"), ("1.0\n", "solved"), ("0", "failed")]
)
def test_reward_txt_alone_is_binary(tmp_path, text, outcome):
    verdict = judged(tmp_path, reward_txt=text)
    assert (verdict.source, verdict.outcome, verdict.total) == (Source.reward_txt, outcome, 1)


def test_json_that_is_no_report_is_passed_over(tmp_path):
    verdict = judged(tmp_path, timing_json='{"seconds": 3}', reward_txt="1")
    assert (verdict.source, verdict.outcome) == (Source.reward_txt, Outcome.solved)


def test_a_ctrf_json_that_is_no_report_is_flagged(tmp_path):
    verdict = judged(tmp_path, ctrf_json='{"tests": 3}', reward_txt="1")
    assert (verdict.source, verdict.outcome) == (Source.reward_txt, Outcome.solved)
    assert verdict.flags == ("ctrf.json: no CTRF report (it has no results)",)


@pytest.mark.parametrize("name", [b"a\xff.json", b"\xed\xa0\x80", b"deep/\xff"])
def test_a_file_name_that_is_no_text_discredits_all_beside_it(tmp_path, name):
    path = Path(os.fsdecode(bytes(tmp_path) + b"/" + name))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    verdict = judged(tmp_path, ctrf_json=ctrf(*ALL), reward_txt="1")
    assert (verdict.outcome, verdict.passed) == (Outcome.infra_error, frozenset())
    assert "is no text" in verdict.flags[0]


def test_what_was_gained_is_unknown_without_an_audit(tmp_path):
    verdict = judged(tmp_path, ctrf_json=ctrf(*SOME), reward_txt="0")
    assert (verdict.to_json()["gained"], verdict.to_json()["nop_passed"]) == (None, None)
    with pytest.raises(ValueError, match="audit the task"):
        verdict.reward("gained")


def test_an_unknown_reward_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="'binery' is unknown; there are"):
        judged(tmp_path, reward_txt="1").reward("binery")


def _with(folder, name, text):
    (folder / name).write_text(text)
    return folder
