"""Which modules a rule takes, and what it says when it takes none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from dtype_hooks import ConfigError, SelectionError, override_dtype
from dtype_hooks.core.override import OverrideRule
from dtype_hooks.core.selection import Selection, as_patterns, nearest, select


def tree(*names, make=lambda: nn.Linear(2, 2)):
    """A model with a Linear under each dotted name."""
    root = nn.Module()
    for name in names:
        here = root
        for part in name.split(".")[:-1]:
            if part not in here._modules:
                here.add_module(part, nn.Module())
            here = here._modules[part]
        here.add_module(name.rpartition(".")[2], make())
    return root


def taken(model, patterns=None, class_patterns=None, exclude=None):
    found = select(model, Selection.make(patterns, class_patterns, exclude))
    return [selected.names[0] for selected in found.taken]


T5 = ("wo", "word_embedding", "h.0.wo", "h.0.wi")


def test_a_pattern_is_searched_anywhere_in_the_dotted_name():
    """O3"""
    assert taken(tree(*T5), ["wo"]) == ["wo", "word_embedding", "h.0.wo"]


def test_an_anchored_pattern_takes_a_whole_component():
    """O3"""
    assert taken(tree(*T5), [r"(^|\.)wo$"]) == ["wo", "h.0.wo"]


def test_exclude_takes_an_accident_away_and_the_record_names_the_pattern_that_caught_it():
    """O3"""
    model = tree(*T5)
    assert taken(model, ["wo"], exclude=["embed"]) == ["wo", "h.0.wo"]
    handle = override_dtype(model, ["wo", "h"])
    assert {r.names[0]: r.caught_by for r in handle.records} == {
        "wo": ("wo",), "word_embedding": ("wo",), "h.0.wo": ("wo", "h"), "h.0.wi": ("h",)
    }  # fmt: skip


def test_one_of_three_like_names_is_taken_with_an_anchor():
    """O4"""
    model = nn.Module()
    model.attention = nn.Module()
    model.attention.query = nn.Linear(2, 2)
    model.attention.query.sub = nn.Linear(2, 2)
    model.attention.query_norm = nn.LayerNorm(2)
    assert taken(model, [r"attention\.query"]) == [
        "attention.query",
        "attention.query.sub",
        "attention.query_norm",
    ]
    assert taken(model, [r"attention\.query$"]) == ["attention.query"]


def test_a_module_is_taken_by_name_or_by_class_in_the_order_of_the_model():
    model = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.LayerNorm(2), nn.Conv2d(1, 1, 1))
    assert taken(model, ["1"], ["Norm"]) == ["0", "1", "2"]
    assert taken(model, None, ["^L"]) == ["0", "1", "2"]
    assert taken(model, None, "Conv.d$") == ["3"]


def test_the_root_is_never_taken():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert taken(model, [".", "^$"], ["Sequential"]) == ["0", "0.0"]
    model[0].add_module("back", model)
    assert taken(model, ["."]) == ["0", "0.0"]


def test_exclude_covers_the_module_and_not_its_children():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert taken(model, ["0"], exclude=["^0$"]) == ["0.0"]


def test_exclude_looks_at_names_and_not_at_classes():
    model = nn.Sequential(nn.Linear(2, 2))
    assert taken(model, ["0"], exclude=["Linear"]) == ["0"]


def test_a_shared_module_is_taken_once_with_all_its_names():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": shared, "decoder": nn.Sequential(shared)})
    handle = override_dtype(model, ["decoder.0", "encoder"], dtype="float64")
    assert [(r.names, r.caught_by) for r in handle.records] == [
        (("encoder", "decoder.0"), ("decoder.0", "encoder"))
    ]
    assert handle.total == 2
    seen = []
    shared.register_forward_hook(lambda m, args, out: seen.append(1))
    model["encoder"](torch.ones(1, 2))
    assert seen == [1]


def test_a_shared_module_is_excluded_under_any_of_its_names():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": shared, "decoder": shared})
    assert taken(model, ["encoder"], exclude=["decoder"]) == []


def test_flags_and_alternatives_inside_a_regex_work():
    model = nn.ModuleDict({"Norm": nn.LayerNorm(2), "head": nn.Linear(2, 2)})
    assert taken(model, ["(?i)norm|HEAD"]) == ["Norm", "head"]


def test_a_renamed_layer_gets_a_warning_with_the_nearest_name():
    """O5"""
    model = tree("lm_head", "encoder.layer.0")
    with pytest.warns(
        UserWarning, match=r"patterns: 'lm_haed' matched none of 4 modules; nearest names: 'lm_head'"
    ):
        handle = override_dtype(model, ["lm_haed", "layer.0"])
    assert len(handle.records) == 1
    assert len(handle.warnings) == 1


def test_a_pattern_unlike_every_name_says_that_there_is_none():
    """O5"""
    with pytest.warns(UserWarning, match="'output' matched none of 1 modules; nearest names: none"):
        override_dtype(tree("lm_head"), ["output"])


@pytest.mark.parametrize("kind", ["patterns", "class_patterns", "exclude"])
def test_every_kind_of_pattern_can_be_dead_and_strict_makes_it_an_error(kind):
    """O5"""
    model = nn.ModuleDict({"cls_head": nn.Linear(2, 2)})
    rule = {"patterns": ["cls"], kind: ["Lineer"] if kind == "class_patterns" else ["clz_head"]}
    near = "'Linear'" if kind == "class_patterns" else "'cls_head'"
    with pytest.warns(UserWarning, match=f"{kind}: .* matched none of 1 modules; nearest names: {near}"):
        override_dtype(model, **rule)
    untouched = nn.ModuleDict({"cls_head": nn.Linear(2, 2)})
    with pytest.raises(SelectionError, match=f"{kind}: .*nearest names: {near}.*drop strict=True"):
        override_dtype(untouched, **rule, strict=True)
    assert "forward" not in untouched["cls_head"].__dict__


def test_strict_with_a_dead_method_leaves_nothing_behind():
    model = tree("head")
    before = dict(model.head.__dict__)
    with pytest.raises(SelectionError, match="'encode'"):
        override_dtype(model, ["head"], methods_to_override=["forward", "encode"], strict=True)
    assert model.head.__dict__ == before


def test_a_rule_without_patterns_takes_nothing_and_says_so_once():
    """O17"""
    with pytest.warns(
        UserWarning, match="no patterns and no class_patterns: nothing is overridden"
    ) as caught:
        handle = override_dtype(tree("head"))
    assert len(caught) == 1
    assert handle.records == []
    assert handle.total == 1


def test_a_rule_whose_exclude_takes_everything_away_says_so():
    """O17"""
    with pytest.warns(UserWarning, match="exclude takes away all that the patterns match"):
        assert override_dtype(tree("head"), ["head"], exclude=["head"]).records == []


def test_a_rule_that_takes_something_is_silent_and_counts():
    """O17"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = override_dtype(tree(*T5), ["h"])
    assert (len(handle.records), handle.total) == (2, 6)


def test_methods_that_a_module_lacks_are_passed_over():
    class WithEncode(nn.Linear):
        def encode(self, x):
            return self(x)

    model = nn.Sequential(WithEncode(2, 2), nn.Linear(2, 2))
    handle = override_dtype(model, ["."], methods_to_override=["forward", "encode"])
    assert [(r.names[0], r.method) for r in handle.records] == [
        ("0", "forward"),
        ("0", "encode"),
        ("1", "forward"),
    ]


def test_containers_without_a_forward_are_passed_over():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict(), nn.ParameterList(), nn.Module())
    assert [r.names[0] for r in override_dtype(model, ["."]).records] == ["0.0"]


def test_what_computes_a_parametrized_weight_belongs_to_its_module():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2).bfloat16()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = override_dtype(model, ["0"])
        model(torch.ones(1, 2).bfloat16())
    assert "0" in [r.names[0] for r in handle.records]
    assert "0.parametrizations.weight" not in [r.names[0] for r in handle.records]


def test_only_containers_matched_is_a_warning():
    """O17"""
    with pytest.warns(UserWarning, match="none of the 1 selected modules has a method 'forward'"):
        assert override_dtype(nn.Sequential(nn.ModuleList()), ["0"]).records == []


def test_a_bare_string_is_one_pattern():
    assert as_patterns("a|b", "w") == ("a|b",)
    assert as_patterns(None, "w") == ()
    assert as_patterns(["a", "b"], "w") == ("a", "b")
    assert taken(tree("abc"), "abc") == ["abc"]


@pytest.mark.parametrize(
    "value", [1, b"norm", {"a": 1}, {"a"}, [1], [None], ("a", 2), torch.float32, [["a"]], True]
)
@pytest.mark.parametrize("kind", ["patterns", "class_patterns", "exclude"])
def test_what_is_no_list_of_strings_is_refused(kind, value):
    with pytest.raises(ConfigError, match=rf"^override_dtype\.{kind}: got .*; expected a list of regular"):
        override_dtype(tree("a"), **{kind: value})


@pytest.mark.parametrize("value", ["head(", "*", "[a", "(?P<n", "a{2,1}"])
def test_a_regex_that_does_not_compile_is_refused(value):
    with pytest.raises(ConfigError, match=r"expected a regular expression \(.*re\.escape"):
        override_dtype(tree("a"), ["fine", value])


def test_an_empty_regex_is_refused():
    with pytest.raises(ConfigError, match=r"non-empty regular expression\. Write '\.'"):
        override_dtype(tree("a"), [""])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp61"}, r"^override_dtype\.dtype: got 'fp61'"),
        ({"cast_inputs": "most"}, r"^override_dtype\.cast_inputs: got 'most'; expected .*'first'.*'all'"),
        ({"cast_inputs": None}, r"cast_inputs: got None"),
        ({"cast_inputs": ["all"]}, r"cast_inputs: got \['all'\]"),
        ({"strict": "yes"}, r"^override_dtype\.strict: got 'yes'; expected True or False"),
        ({"strict": 1}, r"strict: got 1"),
        ({"methods_to_override": []}, r"methods_to_override: got \[\]; expected at least one"),
        (
            {"methods_to_override": ["__call__"]},
            r"methods_to_override: got '__call__'; expected names of ordinary",
        ),
        ({"methods_to_override": ["a.b"]}, r"got 'a\.b'"),
        ({"methods_to_override": 3}, r"methods_to_override: got 3"),
    ],
)
def test_every_other_wrong_argument_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        override_dtype(tree("a"), ["a"], **arguments)


def test_a_rule_says_what_it_is():
    rule = OverrideRule.make(["a"], ["B"], "bf16", exclude="c", name="DtypeOverrider")
    assert str(rule) == (
        "DtypeOverrider(patterns=['a'], class_patterns=['B'], exclude=['c'], dtype='bfloat16')"
    )
    assert "no patterns" in str(OverrideRule.make())


def test_nearest_names_compare_whole_names_and_last_components():
    names = ["backbone.layer1.norm", "neck", "cls_head"]
    assert nearest(r"head\.", names) == ["cls_head"]
    assert nearest("nrom", names) == ["backbone.layer1.norm"]
    assert nearest("backbone.layer1.nrom", names)[0] == "backbone.layer1.norm"
    assert nearest("zzzz", names) == []
    assert nearest("$", names) == []
