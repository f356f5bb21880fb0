"""The text of docs/rules.md: the table of rules, who else refuses a recipe, and what others accept silently.

    python tools/rules.py          writes it anew (`make docs`); a test holds the page to it

Rules come from the code. What is said of other frameworks stands here, each line with what answers it and its test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlrecipes.plan.rules.rule import Rule
from rlrecipes.plan.rules.table import JUDGES, RULES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "rules.md"


class Silence(NamedTuple):
    """Something that is accepted without a word elsewhere.

    Attributes:
        what: happens there.
        answer: what happens here; names of rules and judges in backquotes.
        test: that shows it, below tests/.
    """

    what: str
    answer: str
    test: str


SILENCES = {
    "Names": (
        Silence(
            "A misspelt option is dropped by a parser that leaves unknown words to the next one.",
            "`schema`: a recipe is closed, wherever the key comes from.",
            "unit/config/test_compose.py::test_a_misspelt_key_fails_with_the_nearest_right_one",
        ),
        Silence(
            "An unknown engine option is dropped with a line in a log.",
            "`native_options`: held against the pinned version's own list.",
            "unit/plan/test_native.py::test_options_that_any_server_refuses",
        ),
        Silence(
            "An unknown key of a served model (`update_weight:`) is ignored, and the model is never updated.",
            "`schema`",
            "unit/plan/test_rules_silence.py::test_a_misspelt_key_of_a_served_model",
        ),
        Silence(
            "An unknown model's name falls back to the default router.",
            "`scoring_model_is_served`, `policy_is_served`",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "An option is parsed, documented, and read by nobody.",
            "A test looks for the reader of every key of the schema.",
            "unit/config/test_keys_have_readers.py::test_every_key_is_read_outside_the_room_that_defines_it",
        ),
        Silence(
            "A fact of a model is not read, and another model is trained.",
            "Each is built by the trainer, or the run of a model that has it is refused.",
            "unit/config/test_keys_have_readers.py::test_every_fact_of_a_model_is_built_or_refused",
        ),
        Silence(
            "The manual names an option, an argument or a default that does not exist.",
            "docs/config.md, docs/metrics.md and this page are made from the code, and tests hold them to it.",
            "unit/config/test_reference.py::test_docs_are_current",
        ),
    ),
    "Values": (
        Silence(
            "`1e-4` in a YAML file becomes a string.",
            "It is a number; a string where a number belongs is refused by `schema`, in a saved plan too.",
            "unit/plan/test_rules_silence.py::test_an_exponent_without_a_point_is_a_number_or_refused",
        ),
        Silence(
            "A file that is read after batch sizes were derived changes them, or any attribute, unchecked.",
            "Everything is composed first, judged once, and frozen.",
            "unit/plan/test_rules_silence.py::test_what_was_judged_cannot_be_changed",
        ),
        Silence(
            "A KL coefficient without a reference ends in a TypeError.",
            "`kl_coefficient_has_a_place`; where a KL is placed the Plan has the reference.",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "A correction can be had by an import path only; what its gradient is stands nowhere.",
            "Each has a name in `algo.off_policy.correction` or `algo.kl`; docs/algorithms.md gives the formulas.",
            "unit/algos/test_kl.py::test_expected_gradients_are_the_documented_ones",
        ),
        Silence(
            "A hook's path or signature is wrong, and fails at its first use, with all engines loaded.",
            "`custom_loss_fits`, `reward`",
            "unit/plan/test_rules_silence.py::test_every_key_that_names_a_function_is_judged_before_a_run",
        ),
        Silence(
            "Model facts are copied into a script, and may differ from config.json.",
            "`model_facts`: a difference names the field.",
            "unit/plan/test_families.py::test_a_difference_names_its_field",
        ),
    ),
    "Batches and groups": (
        Silence(
            "Rollouts that no train step takes are dropped.",
            "`train_steps_divide_prompts`",
            "unit/plan/test_resolve.py::test_batch_arithmetic_is_exact",
        ),
        Silence(
            "Irregular counts of samples turn a group's normalisation into the whole batch's.",
            "A group is the rollouts of one prompt, however many there are and whatever stands between them.",
            "unit/algos/test_advantages.py::test_equals_a_loop_over_unequal_interleaved_groups",
        ),
        Silence(
            "A group of one makes every advantage 0.",
            "`group_has_a_baseline`",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "A filter that keeps nothing collects for ever.",
            "`filter_can_keep_a_group`; what only the rewards can tell stops the run.",
            "unit/rollout/test_collector.py::test_a_filter_that_drops_everything_stops_the_run",
        ),
        Silence(
            "Surplus groups and aborted prompts are thrown away.",
            "Every prompt is trained once, in order, and whatever was collected is trained.",
            "unit/rollout/test_collector.py::test_whenever_the_run_dies_no_prompt_is_trained_twice_or_skipped",
        ),
        Silence(
            "A correction averages inside a micro-batch: the loss depends on what is packed together.",
            "A sample has its weight whatever it is packed with; so has every loss.",
            "unit/algos/test_off_policy.py::test_a_sample_has_its_weights_whatever_it_is_packed_with",
        ),
        Silence(
            "With context parallelism the reward of a sequence lands on a token that its rank does not own.",
            "Advantages are computed on whole sequences, before they are split.",
            "unit/runner/test_learner.py::test_what_ranks_receive_does_not_depend_on_the_layout",
        ),
        Silence(
            "A new field of a sample is left out on its way to the ranks.",
            "Optional arrays stand in one list, the record's; one that only some samples have is refused.",
            "unit/batching/test_grid.py::test_an_empty_sample_and_a_field_in_only_some_samples_are_refused",
        ),
    ),
    "Files": (
        Silence(
            "A malformed line of the prompt file is skipped.",
            "Named with its line, all of them together, before any process starts.",
            "unit/data/test_jsonl.py::test_a_bad_line_is_named",
        ),
        Silence(
            "A path to resume from that is not there starts the run anew.",
            "`resume_is_as_expected`, `model_facts`, `critic_path_holds_a_model`, `distillation_has_a_teacher`",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "Rollouts that wait in a buffer are not in the checkpoint.",
            "They are, until they are trained.",
            "unit/data/test_buffer.py::test_taken_groups_survive_a_restart_until_they_are_trained",
        ),
        Silence(
            "The critic is not resumed.",
            "It is; a checkpoint with one does not load without, nor the other way round.",
            "integration/megatron/test_critic.py",
        ),
        Silence(
            "Metrics are computed and never reported, or promised and never computed.",
            "A metric that docs/metrics.md does not explain is refused.",
            "unit/tracking/test_metrics.py::test_all_unknown_names_are_reported_together",
        ),
    ),
    "Topology": (
        Silence(
            "GPUs that fill no engine are left over.",
            "`open_groups_fill_their_gpus`, `engine_pp_divides_gpus`",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "Regular engines stand beside prefill and decode engines, which the manual forbids and nothing checks.",
            "`one_router_has_one_kind_of_worker`, `prefill_and_decode_come_together`",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "Weights of an unknown quantisation are sent as they are.",
            "`synced_weights_are_held_as_sent`; checksums are compared after a sync.",
            "unit/plan/test_rules.py::test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes",
        ),
        Silence(
            "Only the first updated model is synced.",
            "Every updated model has its route in the Plan.",
            "unit/plan/test_rules_silence.py::test_every_updated_model_has_a_route",
        ),
        Silence(
            "A router is taken for ready after three seconds.",
            "It is asked until it lists its engines.",
            "contract/test_router.py::test_workers_are_listed_and_a_stranger_is_missed",
        ),
        Silence(
            "A dead engine of a model that is not updated stays dead, and requests to it fail.",
            "A process that dies stops the run, with its name.",
            "integration/test_run.py::test_an_engine_that_dies_stops_the_run_with_its_name",
        ),
        Silence(
            "A start-up script kills every Python process of the host.",
            "A run ends the processes that it started, and no others.",
            "integration/test_run.py::test_a_signal_leaves_a_checkpoint_and_no_process",
        ),
    ),
}

_HEAD = """# Rules

Made by `python tools/rules.py` (`make docs`); do not edit.

A recipe is judged before anything starts, and all that is wrong is told together: where, what, what mends it, and where
the value was set. `rlrecipes plan ... --format json` (or `train`) prints it for programs, with exit code 2:

    {"problems": [{"where": "algo.group_size", "problem": "is 1: ...", "fix": "use 2 or more, ...",
                   "origin": "override algo.group_size=1", "rule": "group_has_a_baseline"}]}

`rule` is a name of the tables below. Each rule is a function in `rlrecipes/plan/rules/`, one file a subject, whose
docstring is its reason; tests/unit/plan/test_rules.py shows each one refusing, and the neighbour value passing.

## Judges

| name | judges |
|---|---|
"""
_SILENCE_HEAD = """
## What others accept silently

Seen in frameworks of the field, in their sources or manuals. Nothing here is about deltas of weights or rollouts that
fan out into several samples by configuration: neither is offered yet.
"""


def render_page() -> str:
    """The whole page."""
    lines = [f"| `{name}` | {text} |" for name, text in JUDGES.items()]
    return _HEAD + "\n".join(lines) + "\n" + "\n".join(_render_subjects()) + _SILENCE_HEAD + _render_silences()


def _render_subjects() -> Iterator[str]:
    subjects: dict[str, list[Rule]] = {}
    for rule in RULES:
        subjects.setdefault(rule.subject, []).append(rule)
    for subject, rules in subjects.items():
        yield f"\n## {subject.replace('_', ' ').capitalize()}\n"
        yield "| rule | keys | reason | fix |\n|---|---|---|---|"
        for rule in rules:
            keys = ", ".join(f"`{key}`" for key in rule.keys)
            yield f"| `{rule.name}` | {_escape(keys)} | {_escape(rule.reason)} | {_escape(rule.fix)} |"
    yield ""


def _render_silences() -> str:
    text = ""
    for title, rows in SILENCES.items():
        text += f"\n### {title}\n\n| elsewhere | here | shown by |\n|---|---|---|\n"
        text += "".join(f"| {_escape(row.what)} | {_escape(row.answer)} | `{row.test}` |\n" for row in rows)
    return text


def _escape(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
