"""How mistakes are said: one readable line whatever is wrong, and the nearest of many names."""

import copy
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_results import experiment
from pydantic import BaseModel, ValidationError

from focus import wording
from focus.config import Experiment
from focus.errors import UserError
from focus.jobs import MethodsJob
from focus.strict import Positive, Strict

WHOLE = experiment().model_dump(mode="json")
PYDANTIC = ("Input should", "Field required", "Extra inputs", "discriminator", "union", "tag", "further information")
BAD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just({"a": 1}),
    st.just("x" * 500),
    st.just(dict.fromkeys(map(str, range(500)))),
    st.just(list(range(500))),
)


def places(tree, path=()):
    """The path of every mapping, list entry and value of a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


PLACES = list(places(WHOLE))


@settings(deadline=None)
@given(place=st.sampled_from(PLACES), value=BAD, how=st.sampled_from(["replace", "drop", "misspell"]))
def test_whatever_is_wrong_is_said_in_one_readable_line(place, value, how):
    tree = copy.deepcopy(WHOLE)
    *path, last = place
    node = tree
    for part in path:
        node = node[part]
    if how == "replace":
        node[last] = value
    else:
        kept = node.pop(last)
        if how == "misspell" and isinstance(node, dict):
            node[f"{last}x"] = kept
    try:
        Experiment.model_validate(tree)
    except ValidationError as error:
        found = wording.mistake(error, Experiment)
    else:
        return
    assert "\n" not in found.line
    assert len(found.line) < 400
    assert not any(phrase in found.line for phrase in PYDANTIC)
    assert not found.key or leads_somewhere(tree, found.key)


def leads_somewhere(tree, key: str) -> bool:
    """Whether a dotted path is one of the tree's, or of one missing key in it."""
    known = {".".join(map(str, path)) for path in places(tree)}
    return key in known or key.rpartition(".")[0] in known | {""}


def said(model: type[BaseModel], values) -> str:
    with pytest.raises(ValidationError) as error:
        model.model_validate(values)
    return wording.mistake(error.value, model).line


def method(**settings) -> dict:
    """A job whose only row is of a method with these settings."""
    row = {"method": "a", "settings": {"label": "a"} | settings, "attention": "full", "top_k": None}
    return {"rows": [row], "lengths": [1], "heads": 1, "head_dim": 1, "seconds": 1.0, "seed": 0}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (method(kind="wndow"), "rows.0.settings.kind: expected one of \\d+ names, got wndow; did you mean window"),
        (method(kind="nothing alike"), r"rows.0.settings.kind: expected one of \d+ names, got nothing alike$"),
        (method(), "rows.0.settings.kind: this key is missing$"),
        (method(kind="window", snks=1), "rows.0.settings.snks: there is no such key; did you mean sinks"),
        (method(kind="pretrained", sinks=1), "rows.0.settings.sinks: there is no such key$"),
        (method(kind="focus", adapter={"gate": "centered"}), "adapter.gate: expected printed, centred, .* centred"),
        (method(kind="focus", adapter=[1]), r"rows.0.settings.adapter: expected a mapping of keys, got \[1\]"),
        (method(kind="s2") | {"rows": {}}, "rows: expected a valid list, got a mapping of keys"),
        (method(kind="s2") | {"seconds": 0.0}, "seconds: expected above 0, got 0.0"),
        (method(kind="s2") | {"lengths": [1, "2"]}, "lengths.1: expected a valid integer, got '2'"),
        (method(kind="magicpig", tables=256), "rows.0.settings.tables: expected at most 255, got 256"),
        ([], r"expected a mapping of keys, got \[\]"),
    ],
)
def test_each_kind_of_mistake(values, line):
    assert re.search(rf"^(rows.0.settings.)?{line}", said(MethodsJob, values))


def test_a_misspelt_key_comes_before_the_key_it_leaves_missing():
    class Pair(Strict):
        first: Positive
        second: Positive

    assert said(Pair, {"first": 1.0, "secnd": 1.0}) == "secnd: there is no such key; did you mean second? (and 1 more)"


def test_long_lists_of_names_are_counted_and_short_ones_shown():
    assert wording.among(["a", "b"]) == "a, b"
    assert wording.among([f"method-{number}" for number in range(60)]) == "60 names"
    names = ["focus", "focus-hard", "window"]
    assert wording.instead("focs", names) == "got focs; did you mean focus?"
    assert wording.instead("nothing", names) == "got nothing"
    assert wording.instead(3, names) == "got 3"
    assert wording.instead("focus", ["focus"]) == "got focus"


@given(st.sampled_from(["window-sinks", "longformer", "routing_transformer"]), st.data())
def test_a_slip_of_one_letter_finds_the_name_meant(name, data):
    place = data.draw(st.integers(0, len(name) - 1))
    slip = name[:place] + data.draw(st.sampled_from(["", "q", name[place] * 2])) + name[place + 1 :]
    if slip != name:
        assert wording.instead(slip, WHOLE["methods"].keys() | {name}).startswith(f"got {slip}; did you mean ")


def test_settings_from_the_command_line_name_their_option():
    with pytest.raises(UserError, match=r"^--job: rows: expected a valid array, got 1 \(and 5 more\)$"):
        wording.parse(MethodsJob, '{"rows": 1}', "--job")
