"""Every rule of the table is shown firing, and the neighbour of what it refuses passing."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path

import pytest

from rlrecipes.config.compose import compose
from rlrecipes.config.validation import recipe_paths
from rlrecipes.plan.rules.engines import list_trained
from rlrecipes.plan.rules.host import compute_disk_bytes
from rlrecipes.plan.rules.table import RULES, check_recipe
from tests.unit.plan.rule_table import BY_NAME, Case, facts_of

POLICY = "topology.served_models.policy"
MAIN = f"{POLICY}.server_groups.main"
SGLANG = f"{MAIN}.sglang"
TP, PP, VPP, CP = (
    f"parallel.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context")
)
EP, ETP, DP = (f"parallel.{name}_parallel_size" for name in ("expert_model", "expert_tensor", "data"))
MAX_NEW, EVAL_NEW = "rollout.sampling.max_new_tokens", "rollout.evaluation.sampling.max_new_tokens"
GAE = {"algo.estimator": "gae", "algo.baseline": "none", "algo.normalize_std": False}
OWN_LOSS = {"algo.policy_loss": "rlrecipes.algos.policy_loss:compute_policy_loss"}
APART, COLOCATED, PD = ("topology=disaggregated",), ("topology=colocated",), ("topology=pd",)
EXTERNAL = ("topology=external", f"{MAIN}.urls=[http://localhost:3000]")
ROUTER_ONLY = ("topology=router_only",)
MOE = ("model=qwen3_30b_a3b", "topology=disaggregated")
CRITIC_OPTIM = "algo.critic.optim"
GROUPS = {"model.shapes.num_query_groups": 4}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
OPD = ("algo=opd",)
TEACHER_PATH, TEACHER = "algo.distillation.teacher_path", "algo.distillation.teacher_model"
GENERATE = "rollout.generate"
TURNS = ("rollout=multi_turn",)
PRUNER = {"metric": "reward/mean", "percentile": 50.0, "min_points": 4, "num_warmup_steps": 0}
NEXTN = {f"{SGLANG}.speculative_algorithm": "NEXTN"}

CASES = [
    # batch
    Case("train_steps_divide_prompts", "schedule.num_train_steps", {"schedule.num_train_steps": 3},
         {"schedule.num_train_steps": 4}, told="use one of 2, 4, 1, or prompts_per_step=18"),
    Case("rollouts_of_a_step_can_be_listed", "schedule.prompts_per_step",
         {"schedule.prompts_per_step": 4096, "algo.group_size": 257},
         {"schedule.prompts_per_step": 4096, "algo.group_size": 256}, told="1052672 rollouts"),
    # objective
    Case("custom_loss_fits", "algo.policy_loss", {"algo.policy_loss": "json:dumps"},
         {"algo.policy_loss": "clipped"}),
    Case("custom_loss_fits", "algo.policy_loss", {"algo.policy_loss": "no_module:loss"},
         {"algo.policy_loss": "gspo"}, told="no module"),
    Case("custom_loss_is_all_the_loss", "algo.policy_loss", {"algo.policy_loss": "a:b", "algo.entropy_coef": 0.1},
         {"algo.policy_loss": "a:b"}),
    Case("policy_loss_is_known", "algo.policy_loss", {"algo.policy_loss": "gpso"}, {"algo.policy_loss": "gspo"},
         told="did you mean 'gspo'"),
    Case("loss_options_have_a_reader", "algo.policy_loss_options", {"algo.policy_loss_options": {"scale": 1}},
         {"algo.policy_loss_options": {"scale": 1}, "algo.policy_loss": "a:b"}),
    Case("clip_bound_is_positive", "algo.clip_low", {"algo.clip_low": 1.0}, {"algo.clip_low": 0.99}),
    Case("dual_clip_has_a_loss_to_clip", "algo.dual_clip", {"algo.dual_clip": 3.0}, {"algo.dual_clip": None},
         ("algo=cispo",)),
    Case("divisor_is_used", "algo.aggregation_divisor", {"algo.aggregation_divisor": 16.0},
         {"algo.aggregation_divisor": 16.0, "algo.aggregation": "constant"}),
    Case("kl_coefficient_has_a_place", "algo.kl.coef", {"algo.kl.coef": 0.1},
         {"algo.kl.coef": 0.1, "algo.kl.placement": "loss"}),
    Case("kl_coefficient_has_a_place", "algo.kl.coef", {"algo.kl.coef": 1e-6}, {"algo.kl.coef": 0.0}),
    Case("kl_in_the_loss_has_a_gradient", "algo.kl.estimator",
         {"algo.kl.placement": "loss", "algo.kl.estimator": "k1"},
         {"algo.kl.placement": "loss", "algo.kl.estimator": "k2"}),
    Case("kl_weight_is_in_the_loss", "algo.kl.is_unbiased", {"algo.kl.is_unbiased": True},
         {"algo.kl.is_unbiased": True, "algo.kl.placement": "loss"}),
    Case("weighted_kl_is_no_straight_through", "algo.kl.estimator",
         {"algo.kl.is_unbiased": True, "algo.kl.estimator": "k1_straight_through"},
         {"algo.kl.is_unbiased": True, "algo.kl.estimator": "k1"}),
    Case("kl_of_summed_rewards_is_in_them", "algo.kl.placement", {"algo.kl.placement": "advantage"},
         {"algo.kl.placement": "reward"}, ("algo=reinforce_plus_plus",)),
    Case("correction_bounds_are_in_order", "algo.off_policy.low", {"algo.off_policy.low": 2.1},
         {"algo.off_policy.low": 2.0}),
    Case("correction_compares_two_policies", "algo.off_policy.correction",
         {"algo.off_policy.correction": "icepop", "algo.old_logprobs": "rollout"},
         {"algo.off_policy.correction": "icepop"}),
    Case("veto_has_a_correction", "algo.off_policy.veto", {"algo.off_policy.veto": 0.1},
         {"algo.off_policy.veto": 0.1, "algo.off_policy.correction": "token_mis"}),
    Case("staleness_can_occur", "algo.off_policy.staleness_power", {"algo.off_policy.staleness_power": 1.0},
         {"algo.off_policy.staleness_power": 1.0, "schedule.num_train_steps": 2}),
    # credit
    Case("group_has_a_baseline", "algo.group_size", {"algo.group_size": 1}, {"algo.group_size": 2}),
    Case("baseline_has_a_group", "algo.baseline", {"algo.baseline": "group_mean"}, {}, ("algo=reinforce_plus_plus",)),
    Case("deviation_has_a_group", "algo.normalize_std", {"algo.baseline": "none"},
         {"algo.baseline": "none", "algo.normalize_std": False}),
    Case("critic_fits_the_estimator", "algo.critic", GAE, {}),
    Case("critic_fits_the_estimator", "algo.critic", {"algo.estimator": "returns"}, {}, ("algo=ppo",)),
    Case("policy_learns_after_the_critic", "algo.critic.num_warmup_steps", {"algo.critic.num_warmup_steps": 30},
         {"algo.critic.num_warmup_steps": 29}, ("algo=ppo",)),
    Case("critic_path_holds_a_model", "algo.critic.path", {"algo.critic.path": "nowhere"},
         {"algo.critic.path": "MODEL"}, ("algo=ppo",)),
    Case("filter_can_keep_a_group", "rollout.filters", {"rollout.filters": ["nonzero_variance"]},
         {"rollout.filters": ["nonzero_variance"], "algo.group_size": 2}, ("algo=reinforce_plus_plus",)),
    Case("overlong_buffer_fits_the_response", "algo.overlong.buffer_tokens", {"algo.overlong.buffer_tokens": 17},
         {"algo.overlong.buffer_tokens": 16}, ("algo=dapo",)),
    Case("overlong_buffer_fits_the_response", "algo.overlong.buffer_tokens", {"algo.overlong.buffer_tokens": 33},
         {"algo.overlong.buffer_tokens": 32}, ("algo=dapo", "rollout=multi_turn")),
    Case("distillation_has_a_teacher", TEACHER_PATH, {}, {TEACHER_PATH: "MODEL"}, OPD),
    Case("distillation_has_a_teacher", TEACHER_PATH, {TEACHER_PATH: "nowhere"}, {TEACHER_PATH: "MODEL"}, OPD,
         told="config.json"),
    Case("distillation_has_a_teacher", TEACHER_PATH, {TEACHER_PATH: "MODEL", TEACHER: "policy"},
         {TEACHER: "policy"}, OPD, told="there can be one"),
    Case("topk_distillation_sees_whole_distributions", "algo.distillation.form",
         {"algo.distillation.form": "topk", "rollout.sampling.top_p": 0.9}, {"algo.distillation.form": "topk"},
         OPD),
    Case("teacher_has_so_many_tokens", "algo.distillation.top_k", {"algo.distillation.top_k": 129},
         {"algo.distillation.top_k": 128}, OPD),
    # sampling
    Case("siblings_differ", "rollout.sampling.temperature", {"rollout.sampling.temperature": 1e-7},
         {"rollout.sampling.temperature": 1e-6}),
    Case("siblings_differ", "rollout.sampling.top_k", {"rollout.sampling.top_k": 1}, {"rollout.sampling.top_k": 2}),
    Case("end_tokens_are_allowed", "rollout.sampling.min_new_tokens", {"rollout.sampling.min_new_tokens": 1}, {}),
    Case("old_logprobs_are_of_what_was_kept", "algo.old_logprobs",
         {"rollout.sampling.top_p": 0.9, "algo.old_logprobs": "rollout"}, {"rollout.sampling.top_p": 0.9}),
    Case("old_logprobs_are_of_what_was_kept", "algo.old_logprobs",
         {"rollout.sampling.top_k": 5, "algo.old_logprobs": "rollout"}, {"algo.old_logprobs": "rollout"}),
    Case("engines_report_scaled_logprobs", f"{MAIN}.env.SGLANG_RETURN_ORIGINAL_LOGPROB",
         {f"{MAIN}.env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "True"}},
         {f"{MAIN}.env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}}),
    Case("top_k_is_a_count", "rollout.evaluation.sampling.top_k", {"rollout.evaluation.sampling.top_k": 0},
         {"rollout.evaluation.sampling.top_k": -1}),
    Case("shortest_response_is_allowed", "rollout.sampling.min_new_tokens", {"rollout.sampling.min_new_tokens": 17},
         {"rollout.sampling.min_new_tokens": 16}),
    # turns
    Case("generate_function_is_known", f"{GENERATE}.name", {f"{GENERATE}.name": "single_trun"}, {},
         told="did you mean 'single_turn'"),
    Case("generate_function_fits", f"{GENERATE}.name", {f"{GENERATE}.name": "json:dumpss"}, {}),
    Case("generate_function_fits", f"{GENERATE}.options", {f"{GENERATE}.options": {"depth": 2}}, {}),
    Case("single_turn_is_one_turn", f"{GENERATE}.max_turns", {f"{GENERATE}.max_turns": 2}, {}),
    Case("single_turn_is_one_turn", f"{GENERATE}.max_observation_tokens", {f"{GENERATE}.max_observation_tokens": 1},
         {f"{GENERATE}.max_observation_tokens": 1, f"{GENERATE}.name": "a:b"}),
    Case("multi_turn_has_room_for_turns", f"{GENERATE}.max_turns", {f"{GENERATE}.max_turns": 1},
         {f"{GENERATE}.max_turns": 2}, TURNS),
    Case("multi_turn_has_room_for_turns", f"{GENERATE}.max_observation_tokens",
         {f"{GENERATE}.max_observation_tokens": 0}, {f"{GENERATE}.max_observation_tokens": 1}, TURNS),
    Case("environment_has_a_reader", f"{GENERATE}.environment", {f"{GENERATE}.environment": None}, {}, TURNS),
    Case("environment_has_a_reader", f"{GENERATE}.environment", {f"{GENERATE}.name": "single_turn"},
         {f"{GENERATE}.name": "single_turn", f"{GENERATE}.environment": None}, TURNS),
    Case("observation_role_has_a_template", f"{GENERATE}.observation_role", {f"{GENERATE}.observation_role": "tool"},
         {f"{GENERATE}.observation_role": "tool", "data.apply_chat_template": True}),
    Case("environment_fits", f"{GENERATE}.environment.name", {f"{GENERATE}.environment.name": "rety"}, {}, TURNS,
         told="did you mean 'retry'"),
    Case("environment_fits", f"{GENERATE}.environment.name", {f"{GENERATE}.environment.name": "no_module:answer"}, {},
         TURNS, told="no module"),
    Case("environment_fits", f"{GENERATE}.environment.options", {f"{GENERATE}.environment.options": {}}, {}, TURNS,
         told="feedback"),
    Case("environment_fits", f"{GENERATE}.environment.options.feedbak",
         {f"{GENERATE}.environment.options.feedbak": "no"}, {}, TURNS, told="did you mean 'feedback'"),
    Case("environment_fits", f"{GENERATE}.environment.options.feedback",
         {f"{GENERATE}.environment.options.feedback": 5}, {}, TURNS),
    # data
    Case("prompt_files_exist", "data.train_path", {"data.tasks": None}, {}),
    Case("evaluation_has_prompts", "schedule.eval_interval", {"data.eval_path": None},
         {"data.eval_path": None, "schedule.eval_interval": 0}),
    Case("tasks_have_a_dataset", "data.tasks.datasets", {"data.tasks.datasets": {}},
         {"data.tasks.datasets": {"chain_sum": {}}}),
    Case("held_out_rows_suffice", "rollout.evaluation.num_prompts", {"data.tasks.num_eval_rows": 127},
         {"data.tasks.num_eval_rows": 128}, told="at most 127"),
    # lengths: 16 tokens of prompt, a model of 128
    Case("rollouts_fit_the_model", MAX_NEW, {MAX_NEW: 113}, {MAX_NEW: 112}),
    Case("rollouts_fit_the_model", EVAL_NEW, {EVAL_NEW: 113}, {EVAL_NEW: 112}),
    Case("rollouts_fit_the_model", MAX_NEW, {f"{GENERATE}.max_observation_tokens": 81, EVAL_NEW: 15},
         {f"{GENERATE}.max_observation_tokens": 80}, TURNS, told="2 x 16 new + 1 x 81 observation tokens"),
    Case("engines_finish_every_rollout", MAX_NEW, {MAX_NEW: 105}, {MAX_NEW: 104}, told="cut an answer at 120"),
    Case("engines_finish_every_rollout", MAX_NEW, {MAX_NEW: 112}, {MAX_NEW: 113}),
    Case("micro_batch_holds_the_longest_sample", "parallel.max_tokens_per_micro_batch",
         {"parallel.max_tokens_per_micro_batch": 31}, {"parallel.max_tokens_per_micro_batch": 32}, told="at least 32"),
    Case("micro_batch_holds_the_longest_sample", "parallel.max_tokens_per_micro_batch",
         {CP: 2, "data.max_prompt_tokens": 17, "parallel.max_tokens_per_micro_batch": 17},
         {CP: 2, "data.max_prompt_tokens": 17, "parallel.max_tokens_per_micro_batch": 18}, told="at least 18"),
    Case("micro_batch_holds_the_longest_sample", "parallel.max_tokens_per_micro_batch",
         {"parallel.max_tokens_per_micro_batch": 111}, {"parallel.max_tokens_per_micro_batch": 112}, TURNS),
    Case("micro_batch_holds_the_longest_sample", "parallel.max_tokens_per_micro_batch",
         {"parallel.max_tokens_per_micro_batch": 32, MAX_NEW: 17},
         {"parallel.max_tokens_per_micro_batch": 32, EVAL_NEW: 17}),
    Case("engines_hold_the_longest_rollout", f"{SGLANG}.max_total_tokens", {f"{SGLANG}.max_total_tokens": 39},
         {f"{SGLANG}.max_total_tokens": 40}, told="has 32 tokens use at least 40"),
    Case("engines_hold_the_longest_rollout", f"{SGLANG}.context_length",
         {f"{SGLANG}.context_length": "1Ki", EVAL_NEW: 1001}, {f"{SGLANG}.context_length": "1Ki", EVAL_NEW: 1000},
         APART, (2,)),
    Case("engine_context_is_the_models", f"{SGLANG}.context_length", {f"{SGLANG}.context_length": 129},
         {f"{SGLANG}.context_length": 128}, APART, (2,)),
    # topology
    Case("policy_is_served", "topology.served_models", {"topology.served_models": {}}, {}, told="holds nothing"),
    Case("policy_is_updated", f"{POLICY}.is_updated", {f"{POLICY}.is_updated": False}, {}),
    Case("updated_model_is_the_trained_one", f"{POLICY}.path", {f"{POLICY}.path": "MODEL"}, {}),
    Case("served_model_has_engines", f"{POLICY}.server_groups", {f"{POLICY}.server_groups": {}},
         {f"{POLICY}.server_groups": {}, f"{POLICY}.num_joining_engines": 1}),
    Case("prefill_and_decode_come_together", f"{POLICY}.server_groups",
         {f"{POLICY}.server_groups.decode.worker_type": "prefill"}, {}, PD, (3,), "no decode engines"),
    Case("one_router_has_one_kind_of_worker", f"{POLICY}.server_groups",
         {f"{POLICY}.server_groups.decode.worker_type": "regular"}, {}, PD, (3,)),
    Case("caches_known_to_nixl_stay", "topology.should_offload_engines", {"topology.should_offload_engines": True},
         {}, ("topology=pd_colocated",), (2,), "NIXL knows the KV caches"),
    Case("caches_known_to_nixl_stay", "topology.should_offload_engines", {"topology.should_offload_engines": True},
         {"topology.should_offload_engines": True,
          f"{POLICY}.server_groups.prefill.sglang.disaggregation_transfer_backend": "mooncake",
          f"{POLICY}.server_groups.decode.sglang.disaggregation_transfer_backend": "mooncake"},
         ("topology=pd_colocated",), (2,)),
    Case("embedded_engine_is_one_cpu_process", f"{MAIN}.engine", {"topology.device": "cuda"}, {}, (), (1,)),
    Case("embedded_engine_is_one_cpu_process", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 2}, {}),
    Case("embedded_engine_is_one_cpu_process", f"{MAIN}.worker_type", {f"{MAIN}.worker_type": "prefill"}, {}),
    Case("external_engines_have_urls", f"{MAIN}.urls", {f"{MAIN}.urls": []}, {}, EXTERNAL, (1,), "nobody is there"),
    Case("external_engines_have_urls", f"{MAIN}.urls", {f"{MAIN}.urls": ["http://a:1"]}, {}),
    Case("external_engines_are_as_others_made_them", f"{MAIN}.num_engines", {f"{MAIN}.num_engines": 2},
         {f"{MAIN}.num_engines": 1}, EXTERNAL, (1,), "is 2; urls has 1"),
    *(
        Case("external_engines_are_as_others_made_them", f"{MAIN}.{key}", {f"{MAIN}.{key}": value}, {}, EXTERNAL, (1,))
        for key, value in (
            *((size, 2) for size in ("gpus_per_engine", "pipeline_parallel_size", "attention_data_parallel_size",
                                     "expert_parallel_size")),
            ("python", sys.executable),
            ("env", {"A": "b"}),
        )
    ),
    Case("external_engines_are_as_others_made_them", f"{MAIN}.env",
         {f"{MAIN}.env": {"A": "b"}}, {f"{MAIN}.env": {"A": "b"}, f"{MAIN}.engine": "sglang"}, EXTERNAL, (2,)),
    Case("urls_are_addresses", f"{MAIN}.urls", {f"{MAIN}.urls": ["a:1"]}, {}, EXTERNAL, (1,)),
    Case("urls_are_addresses", f"{MAIN}.urls", {f"{MAIN}.urls": ["http://a:1", "http://a:1"]},
         {f"{MAIN}.urls": ["http://a:1", "http://a:2"]}, EXTERNAL, (1,), "twice"),
    Case("interpreter_exists", f"{MAIN}.python", {f"{MAIN}.python": "/nowhere/python"}, {}),
    # models that score
    Case("classifier_has_engines_that_classify", "reward.options.model",
         {"reward.name": "served_classifier", "reward.options": {"model": "policy"}}, {"reward.name": "served_judge"}),
    Case("scoring_model_is_served", TEACHER, {TEACHER: "polcy"}, {TEACHER: "policy"}, OPD, told="'policy'"),
    Case("scoring_model_is_frozen", TEACHER, {TEACHER: "policy"}, {}, OPD),
    Case("scoring_model_has_regular_engines", TEACHER, {TEACHER: "policy"}, {}, (*OPD, *PD), (3,)),
    Case("scores_are_of_the_sampled_distribution", TEACHER, {TEACHER: "policy", "rollout.sampling.temperature": 0.7},
         {TEACHER: "policy"}, OPD),
    Case("reference_is_asked_for_a_kl", "algo.kl.reference_model", {"algo.kl.reference_model": "policy"},
         {"algo.kl.reference_model": "policy", "algo.kl.placement": "loss"}),
    Case("frozen_model_path_holds_a_model", f"{POLICY}.path", {f"{POLICY}.path": "nowhere"},
         {f"{POLICY}.path": "MODEL"}),
    # engines: 4 heads, 2 groups, 384 columns, 4 layers; 128 experts of 768 columns
    Case("engine_pp_divides_gpus", f"{MAIN}.pipeline_parallel_size", {f"{MAIN}.pipeline_parallel_size": 2},
         {f"{MAIN}.pipeline_parallel_size": 2, f"{MAIN}.gpus_per_engine": 2}, APART, (3,)),
    Case("engine_tp_is_split_evenly", f"{MAIN}.expert_parallel_size",
         {f"{MAIN}.gpus_per_engine": 4, f"{MAIN}.expert_parallel_size": 3},
         {f"{MAIN}.gpus_per_engine": 4, f"{MAIN}.expert_parallel_size": 2}, MOE, (8,), "use 2, 4, 1"),
    Case("engine_tp_is_split_evenly", f"{MAIN}.attention_data_parallel_size",
         {f"{MAIN}.attention_data_parallel_size": 2},
         {f"{MAIN}.gpus_per_engine": 2, f"{MAIN}.attention_data_parallel_size": 2}, APART, (3,)),
    Case("open_groups_fill_their_gpus", f"{MAIN}.num_engines", {f"{MAIN}.gpus_per_engine": 2},
         {f"{MAIN}.gpus_per_engine": 2, f"{MAIN}.num_engines": 3}, APART, (8,), "makes 3: 1 of the 7 GPUs"),
    Case("open_groups_fill_their_gpus", f"{MAIN}.num_engines", {f"{MAIN}.gpus_per_engine": 2, DP: 3},
         {f"{MAIN}.gpus_per_engine": 2, DP: 4}, COLOCATED, (8,), "1 of the 3 GPUs"),
    Case("engine_fills_its_nodes_evenly", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 12},
         {f"{MAIN}.gpus_per_engine": 16}, APART, (8, 8, 8), "is 12, of which its nodes have 8, 4"),
    Case("engine_fills_its_nodes_evenly", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 12},
         {f"{MAIN}.gpus_per_engine": 12, f"{MAIN}.worker_type": "placeholder"}, APART, (8, 8, 8)),
    Case("engine_fills_its_nodes_evenly", f"{MAIN}.pipeline_parallel_size",
         {f"{MAIN}.gpus_per_engine": 12, f"{MAIN}.pipeline_parallel_size": 3},
         {f"{MAIN}.gpus_per_engine": 12, f"{MAIN}.pipeline_parallel_size": 4}, APART, (6, 6, 6), "over 2 nodes"),
    Case("engine_fills_its_nodes_evenly", f"{MAIN}.pipeline_parallel_size",
         {f"{MAIN}.gpus_per_engine": 12, f"{MAIN}.pipeline_parallel_size": 2},
         {f"{MAIN}.gpus_per_engine": 16, f"{MAIN}.pipeline_parallel_size": 2}, APART, (4,) * 5, "over 3 nodes"),
    Case("engine_tp_divides_heads", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 8},
         {f"{MAIN}.gpus_per_engine": 4}, APART, (16,), "num_attention_heads=4"),
    Case("engine_tp_divides_heads", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 8},
         {f"{MAIN}.gpus_per_engine": 8, f"{MAIN}.pipeline_parallel_size": 2}, APART, (16,)),
    Case("engine_tp_divides_heads", f"{MAIN}.gpus_per_engine",
         {f"{MAIN}.gpus_per_engine": 8, "model.shapes.linear_num_key_heads": 12},
         {f"{MAIN}.gpus_per_engine": 8, "model.shapes.linear_num_key_heads": 16},
         ("model=qwen3_next_80b_a3b", *APART), (16,), "linear_num_key_heads=12"),
    Case("engine_tp_divides_heads", f"{MAIN}.gpus_per_engine", {f"{MAIN}.gpus_per_engine": 8},
         {f"{MAIN}.gpus_per_engine": 8, f"{MAIN}.attention_data_parallel_size": 2}, APART, (16,)),
    Case("engine_tp_divides_heads", f"{MAIN}.gpus_per_engine",
         {"model.shapes.num_query_groups": 3, "model.shapes.num_attention_heads": 6, f"{MAIN}.gpus_per_engine": 2},
         {"model.shapes.num_query_groups": 2, "model.shapes.num_attention_heads": 6, f"{MAIN}.gpus_per_engine": 2},
         APART, (3,), "num_query_groups=3"),
    Case("engine_tp_divides_widths", f"{MAIN}.gpus_per_engine",
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.ffn_hidden_size": 386},
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.ffn_hidden_size": 388}, APART, (8,)),
    Case("engine_tp_divides_widths", f"{MAIN}.expert_parallel_size",
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.moe_ffn_hidden_size": 770},
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.moe_ffn_hidden_size": 770, f"{MAIN}.expert_parallel_size": 2},
         MOE, (8,)),
    Case("engine_tp_divides_widths", f"{MAIN}.expert_parallel_size",
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.num_moe_experts": 126, f"{MAIN}.expert_parallel_size": 4},
         {f"{MAIN}.gpus_per_engine": 4, "model.shapes.num_moe_experts": 126, f"{MAIN}.expert_parallel_size": 2},
         MOE, (8,)),
    Case("engine_tp_divides_widths", f"{MAIN}.gpus_per_engine",
         {f"{MAIN}.gpus_per_engine": 2, "model.shapes.ffn_hidden_size": 6145, "model.shapes.first_dense_layers": 1},
         {f"{MAIN}.gpus_per_engine": 2, "model.shapes.ffn_hidden_size": 6145}, MOE, (8,)),
    Case("engine_tp_divides_widths", f"{MAIN}.expert_parallel_size",
         {f"{MAIN}.gpus_per_engine": 2, f"{MAIN}.expert_parallel_size": 2}, {f"{MAIN}.gpus_per_engine": 2}, APART, (8,),
         "no experts"),
    Case("engine_stage_has_a_layer", f"{MAIN}.pipeline_parallel_size",
         {f"{MAIN}.gpus_per_engine": 5, f"{MAIN}.pipeline_parallel_size": 5},
         {f"{MAIN}.gpus_per_engine": 4, f"{MAIN}.pipeline_parallel_size": 4}, APART, (8,)),
    # speculative decoding
    Case("speculative_algorithm_is_known", f"{SGLANG}.speculative_algorithm",
         {f"{SGLANG}.speculative_algorithm": "EAGEL"}, {f"{SGLANG}.speculative_algorithm": "eagle"}, APART, (2,),
         "did you mean 'EAGLE'"),
    Case("speculation_has_an_algorithm", f"{SGLANG}.speculative_num_steps", {f"{SGLANG}.speculative_num_steps": 3},
         {f"{SGLANG}.speculative_num_steps": 3, f"{SGLANG}.speculative_algorithm": "EAGLE"}, APART, (2,)),
    Case("speculation_has_a_draft", f"{SGLANG}.speculative_algorithm", NEXTN,
         NEXTN | {f"{SGLANG}.speculative_draft_model_path": "x"}, APART, (2,), "no prediction layers"),
    Case("speculation_has_a_draft", f"{SGLANG}.speculative_algorithm", {f"{SGLANG}.speculative_algorithm": "EAGLE3"},
         NEXTN, ("model=qwen3_next_80b_a3b", "topology=disaggregated"), (8,)),
    Case("speculation_counts_come_together", f"{SGLANG}.speculative_num_steps",
         NEXTN | {f"{SGLANG}.speculative_num_steps": 3}, NEXTN, APART, (2,), "without speculative_eagle_topk"),
    Case("speculation_counts_come_together", f"{SGLANG}.speculative_eagle_topk",
         NEXTN | {f"{SGLANG}.speculative_eagle_topk": 1, f"{SGLANG}.speculative_num_draft_tokens": 4},
         NEXTN | {f"{SGLANG}.speculative_eagle_topk": 1, f"{SGLANG}.speculative_num_draft_tokens": 4,
                  f"{SGLANG}.speculative_num_steps": 3}, APART, (2,), "without speculative_num_steps"),
    Case("speculation_has_no_pipeline", f"{SGLANG}.speculative_algorithm",
         NEXTN | {f"{MAIN}.gpus_per_engine": 2, f"{MAIN}.pipeline_parallel_size": 2},
         NEXTN | {f"{MAIN}.gpus_per_engine": 2}, APART, (3,)),
    # weight sync
    Case("nccl_joins_gpus_that_nobody_shares", "weight_sync.transport", {"weight_sync.transport": "distributed"},
         {"weight_sync.transport": "tensor"}, COLOCATED, (2,)),
    Case("nccl_joins_gpus_that_nobody_shares", "weight_sync.transport",
         {"weight_sync.transport": "distributed", f"{MAIN}.placement": "colocated"},
         {"weight_sync.transport": "distributed"}, APART, (2,)),
    Case("engines_of_others_are_reached", "weight_sync.transport",
         {f"{MAIN}.urls": ["http://n7:3000"], "weight_sync.transport": "tensor"},
         {f"{MAIN}.urls": ["http://n7:3000"], "weight_sync.transport": "disk"}, EXTERNAL, (1,), "tensor"),
    Case("engines_of_others_are_reached", "weight_sync.transport",
         {f"{MAIN}.urls": ["http://n7:3000"], "weight_sync.transport": "distributed"},
         {f"{MAIN}.urls": ["http://127.0.0.1:3000"], "weight_sync.transport": "distributed"}, EXTERNAL, (1,)),
    Case("handles_are_of_gpus_that_are_known", "weight_sync.transport", {"weight_sync.transport": "tensor"},
         {"weight_sync.transport": "distributed"}, EXTERNAL, (1,)),
    Case("handles_are_of_gpus_that_are_known", "weight_sync.transport", {"weight_sync.transport": "tensor"},
         {"weight_sync.transport": "tensor", "topology.device": "cpu"}, EXTERNAL, (1,), "nobody knows"),
    Case("handles_are_of_gpus_that_are_known", "weight_sync.transport", {"weight_sync.transport": "tensor"},
         {"weight_sync.transport": "tensor", f"{POLICY}.is_updated": False}, ROUTER_ONLY, (1,)),
    Case("shared_memory_reaches_every_engine", "weight_sync.transport",
         {"weight_sync.transport": "tensor", f"{MAIN}.num_engines": 2},
         {"weight_sync.transport": "distributed", f"{MAIN}.num_engines": 2}, APART, (2, 1), "lies on n0:1"),
    # parallel
    Case("experts_are_whole_on_cpu", ETP, {TP: 2, EP: 2}, {TP: 2, EP: 2, ETP: 1}),
    Case("sequence_parallel_has_tp", "parallel.sequence_parallel", {"parallel.sequence_parallel": True},
         {"parallel.sequence_parallel": True, TP: 2}),
    Case("model_chunks_have_a_pipeline", VPP, {VPP: 2}, {VPP: 2, PP: 2}),
    Case("model_chunks_have_a_pipeline", VPP, {VPP: 3}, {VPP: 1}),
    Case("offload_has_somewhere_to_go", "parallel.optimizer_cpu_offload", {"parallel.optimizer_cpu_offload": True},
         {"parallel.optimizer_cpu_offload": True, "topology.device": "cuda", "model.dtype": "bfloat16"}, (), (1,)),
    Case("recomputing_is_said_once", "parallel.recompute_method", {"parallel.recompute_method": "block"}, {}),
    Case("recomputing_is_said_once", "parallel.recompute_num_layers",
         {"parallel.recompute_granularity": "full", "parallel.recompute_method": "uniform"},
         {"parallel.recompute_granularity": "full", "parallel.recompute_method": "uniform",
          "parallel.recompute_num_layers": 1}),
    Case("recomputed_modules_exist", "parallel.recompute_modules", {"parallel.recompute_modules": ["mpl"]},
         {"parallel.recompute_modules": ["mlp"]}, told="did you mean 'mlp'"),
    Case("recomputed_modules_exist", "parallel.recompute_modules", {"parallel.recompute_modules": ["layernorm"]},
         {"parallel.recompute_modules": ["layernorm"], "topology.device": "cuda"}, (), (1,), "Transformer Engine"),
    # shapes
    Case("tp_divides_the_model", TP, {TP: 4}, {TP: 2}, told="num_query_groups=2"),
    Case("tp_divides_the_model", TP, {TP: 2, "model.shapes.moe_shared_expert_intermediate_size": 5},
         {TP: 2, "model.shapes.moe_shared_expert_intermediate_size": 6}, MOE, (8,)),
    Case("tp_divides_the_model", TP,
         {TP: 2, "model.shapes.ffn_hidden_size": 6145, "model.shapes.first_dense_layers": 1},
         {TP: 2, "model.shapes.ffn_hidden_size": 6145}, MOE, (8,)),
    Case("tp_and_cp_divide_linear_heads", TP, {TP: 32}, {TP: 16}, ("model=qwen3_next_80b_a3b",), told="is 32"),
    Case("tp_and_cp_divide_linear_heads", CP, {CP: 32, "model.shapes.linear_num_key_heads": 16},
         {CP: 16, "model.shapes.linear_num_key_heads": 16}, ("model=qwen3_next_80b_a3b",)),
    Case("pp_divides_layers", PP, {PP: 3}, {PP: 4}, told="use 2, 4, 1"),
    Case("vpp_divides_a_stage", VPP, {PP: 2, VPP: 3}, {PP: 2, VPP: 2}),
    Case("vpp_divides_a_stage", VPP, {PP: 2, VPP: 4}, {PP: 1, VPP: 4}, told="the 2 layers"),
    Case("ep_divides_experts", EP, {EP: 3}, {EP: 4}, MOE, (16,), "128 experts"),
    Case("ep_divides_experts", EP, {EP: 2}, {EP: 1}, told="no experts"),
    Case("etp_divides_an_expert", ETP, {ETP: 5}, {ETP: 4}, MOE, (16,)),
    Case("etp_divides_an_expert", ETP, {ETP: 2}, {ETP: 1}, told="no experts"),
    Case("expert_layout_fills_a_stage", EP, {EP: 4, DP: 2}, {EP: 4, DP: 4}, MOE, (16,), "EP x ETP = 4"),
    Case("experts_under_tp_have_sp", "parallel.sequence_parallel", {TP: 2}, {TP: 2, "parallel.sequence_parallel": True},
         MOE, (16,)),
    Case("experts_under_tp_have_sp", "parallel.sequence_parallel", {TP: 4}, {TP: 1}, MOE, (16,)),
    Case("groups_divide_heads", "model.shapes.num_query_groups", {"model.shapes.num_query_groups": 3},
         {"model.shapes.num_query_groups": 4}),
    # precision
    Case("trainer_parts_are_whole_blocks", "parallel.megatron.fp8",
         {"parallel.megatron": {"fp8": "e4m3", "fp8_recipe": "blockwise"}, TP: 2},
         {"parallel.megatron": {"fp8": "e4m3", "fp8_recipe": "delayed"}, TP: 2}, told="blocks of 128"),
    Case("trainer_parts_are_whole_blocks", "parallel.megatron.fp8",
         {"parallel.megatron": BLOCKWISE, TP: 2, "model.shapes.moe_ffn_hidden_size": 896},
         {"parallel.megatron": BLOCKWISE, TP: 2, "model.shapes.moe_ffn_hidden_size": 896, ETP: 1}, MOE, (8,), "is 448"),
    Case("trainer_parts_are_whole_blocks", "parallel.megatron.fp8",
         {"parallel.megatron": BLOCKWISE, TP: 2, "model.shapes.v_head_dim": 65},
         {"parallel.megatron": BLOCKWISE, TP: 2, "model.shapes.v_head_dim": 64}, ("model=deepseek_v3",),
         told="the value heads is 4160"),
    Case("engine_parts_are_whole_blocks", f"{MAIN}.gpus_per_engine",
         {f"{SGLANG}.quantization": "fp8", f"{MAIN}.gpus_per_engine": 4, "model.shapes.ffn_hidden_size": 416},
         {f"{SGLANG}.quantization": "fp8", f"{MAIN}.gpus_per_engine": 4, "model.shapes.ffn_hidden_size": 384},
         APART, (8,), "blocks are 16 wide"),
    Case("engine_parts_are_whole_blocks", f"{MAIN}.gpus_per_engine",
         {f"{SGLANG}.quantization": "mxfp8", f"{MAIN}.gpus_per_engine": 4, "model.shapes.kv_channels": 16, **GROUPS},
         {f"{SGLANG}.quantization": "mxfp8", f"{MAIN}.gpus_per_engine": 4, "model.shapes.kv_channels": 16, **GROUPS,
          f"{MAIN}.attention_data_parallel_size": 2}, APART, (8,), "the query heads is 16"),
    Case("synced_weights_are_held_as_sent", f"{SGLANG}.quantization", {f"{SGLANG}.quantization": "fp8"},
         {f"{SGLANG}.quantization": "unquant"}, APART, (2,)),
    Case("an_engine_tells_one_weight_version", f"{SGLANG}.tokenizer_worker_num", {f"{SGLANG}.tokenizer_worker_num": 4},
         {f"{SGLANG}.tokenizer_worker_num": 1}, APART, (2,)),
    # schedule
    Case("registered_model_is_exported", "tracking.registered_model",
         {"tracking.registered_model": "speller", "tracking.is_mlflow_enabled": False},
         {"tracking.registered_model": "speller", "tracking.is_mlflow_enabled": True}),
    Case("registered_model_is_exported", "tracking.registered_model",
         {"tracking.registered_model": "speller", "schedule.should_export_hf": False},
         {"tracking.registered_model": None, "schedule.should_export_hf": False}),
    *(
        Case("pruner_has_its_metric", "pruner.metric", {"pruner": PRUNER | {"metric": metric}, **extra},
             {"pruner": PRUNER}, told=told)
        for metric, extra, told in (
            ("reward/maen", {}, "did you mean 'reward/mean'"),
            ("response/mean_tokens", {}, "neither better high nor better low"),
            ("eval/spell_backward/accuracy", {"schedule.eval_interval": 0}, "not measured between"),
            ("eval/spell_backward/accuracy", {"data.eval_path": None}, "not measured between"),
            ("eval/gsm8k/accuracy", {"schedule.eval_interval": 1}, "of other data than spell_backward"),
        )
    ),
    Case("learning_rate_decays", "optim.min_lr", {"optim.min_lr": 1.1e-6, "optim.lr": 1e-6},
         {"optim.min_lr": 1e-6, "optim.lr": 1e-6}),
    Case("learning_rate_decays", f"{CRITIC_OPTIM}.min_lr", {f"{CRITIC_OPTIM}.min_lr": 1.1e-5},
         {f"{CRITIC_OPTIM}.min_lr": 1e-5}, ("algo=ppo",)),
    Case("warmup_ends_within_the_run", "optim.num_warmup_train_steps", {"optim.num_warmup_train_steps": 31},
         {"optim.num_warmup_train_steps": 30}),
    Case("warmup_ends_within_the_run", "optim.num_warmup_train_steps",
         {"optim.num_warmup_train_steps": 41, "schedule.num_train_steps": 2, "algo.critic.num_warmup_steps": 10},
         {"optim.num_warmup_train_steps": 40, "schedule.num_train_steps": 2, "algo.critic.num_warmup_steps": 10},
         ("algo=ppo",), told="has 40 train steps"),
    Case("warmup_ends_within_the_run", f"{CRITIC_OPTIM}.num_warmup_train_steps",
         {f"{CRITIC_OPTIM}.num_warmup_train_steps": 31, "algo.critic.num_warmup_steps": 10},
         {f"{CRITIC_OPTIM}.num_warmup_train_steps": 30, "algo.critic.num_warmup_steps": 10}, ("algo=ppo",)),
    Case("warmup_ends_within_the_run", "optim.num_warmup_train_steps",
         {"optim.num_warmup_train_steps": 1, "algo.critic.num_warmup_steps": 31},
         {"algo.critic.num_warmup_steps": 31}, ("algo=ppo",), told="has 0 train steps"),
    Case("reruns_can_be_equal", f"{MAIN}.engine", {"deterministic": True, f"{MAIN}.engine": "sglang"},
         {"deterministic": True}),
    # host
    Case("ports_are_in_range", f"{SGLANG}.port", {f"{SGLANG}.port": 65535, f"{MAIN}.num_engines": 2},
         {f"{SGLANG}.port": 65534, f"{MAIN}.num_engines": 2}, told="65536"),
    Case("ports_are_in_range", f"{POLICY}.router.port", {f"{POLICY}.router.port": 0}, {f"{POLICY}.router.port": 1}),
    Case("ports_are_used_once", f"{SGLANG}.port", {f"{POLICY}.router.prometheus_port": 3000, f"{SGLANG}.port": 3000},
         {f"{POLICY}.router.max_payload_size": 3000, f"{SGLANG}.port": 3000}),
    Case("ports_are_used_once", f"{SGLANG}.port", {f"{POLICY}.router.port": 3001, f"{SGLANG}.port": 3000,
                                                   f"{MAIN}.num_engines": 2},
         {f"{POLICY}.router.port": 3002, f"{SGLANG}.port": 3000, f"{MAIN}.num_engines": 2}, told="router.port"),
    Case("ports_are_used_once", f"{SGLANG}.nccl_port", {f"{SGLANG}.nccl_port": 3000, f"{MAIN}.num_engines": 2},
         {f"{SGLANG}.nccl_port": 3000, f"{MAIN}.num_engines": 1}, APART, (3,), "another engine of the group"),
    Case("ports_are_used_once", f"{SGLANG}.nccl_port", {f"{SGLANG}.nccl_port": 3000, f"{MAIN}.num_engines": 3},
         {f"{SGLANG}.nccl_port": 3000, f"{MAIN}.num_engines": 2}, APART, (2, 2)),
    Case("resume_is_as_expected", "resume", {"resume": "required"}, {"resume": "required", "run_dir": "USED"}),
    Case("resume_is_as_expected", "resume", {"resume": "never", "run_dir": "USED"}, {"resume": "never"}),
    # 2 kept and one being written of 8.19e9 x 14 bytes, 16.4 GB exported
    Case("disk_holds_the_run", "cluster.disk_bytes", {"cluster.disk_bytes": 360_000_000_000},
         {"cluster.disk_bytes": 361_000_000_000}, ("model=qwen3_8b", "topology=disaggregated"), (2,)),
]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """What MODEL and USED stand for in the cases: an HF directory and a run directory with a checkpoint."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    checkpoint = tmp_path / "used" / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    return {"MODEL": str(tmp_path / "model"), "USED": str(tmp_path / "used")}


def judge(case, values, files):
    facts = facts_of(
        {path: files.get(value, value) if isinstance(value, str) else value for path, value in values.items()},
        case.base,
        case.gpus,
    )
    return list(BY_NAME[case.rule].judge(facts)), facts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_refuses_what_breaks_it_and_its_neighbour_passes(case, files):
    found, facts = judge(case, case.broken, files)
    assert case.where in {problem.where for problem in found}
    for problem in found:
        assert problem.rule == case.rule
        assert problem.problem
        assert problem.fix
        keys = [key.replace("<name>", "*") for key in BY_NAME[case.rule].keys]
        assert any(fnmatch.fnmatchcase(problem.where, key) for key in keys), problem.where
    assert any(case.told in f"{problem.problem} {problem.fix}" for problem in found)
    assert set(found) <= set(check_recipe(facts))
    assert judge(case, case.kept, files)[0] == []


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES} == set(BY_NAME)


def test_rules_are_told_apart_and_explained():
    assert len(BY_NAME) == len(RULES)
    for rule in RULES:
        assert rule.reason.endswith("."), rule.name
        assert rule.fix, rule.name
        assert rule.keys, rule.name


def test_every_key_a_rule_names_is_a_recipes():
    paths = {
        path
        for words in (["algo=opd"], ["algo=ppo"], ["algo=dapo"], ["algo=sft"], ["rollout=multi_turn"])
        for path in recipe_paths(compose(words).config.model_dump())
    }
    for rule in RULES:
        for key in rule.keys:
            known = key.replace("<name>", "*")
            parents = [known.rsplit(".", depth)[0] for depth in range(2)]
            assert any(path in paths for path in (known, *parents)), f"{rule.name}: {key}"


def test_blocks_of_a_quantised_checkpoint_are_read_from_it(tmp_path):
    shapes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
              "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128, "rope_parameters": {"rope_theta": 1e4},
              "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": True}  # fmt: skip
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = json.dumps({"model_type": "qwen3", **shapes, "quantization_config": quantization})
    (tmp_path / "config.json").write_text(text)
    base = ("topology=disaggregated", "model=hf", "model.name=x", f"model.path={tmp_path}")
    found = {}
    for size in (4, 8):
        facts = facts_of({f"{MAIN}.gpus_per_engine": size}, base, (16,))
        found[size] = [p.problem for p in BY_NAME["engine_parts_are_whole_blocks"].judge(facts)]
    assert found[4] == []
    assert found[8] == [
        "is 8: blocks are 128 wide, a rank's part of the query heads is 64",
        "is 8: blocks are 128 wide, a rank's part of the key heads is 64",
    ]


@pytest.mark.parametrize(
    ("base", "values", "gigabytes"),
    [
        # 8.190735360e9 parameters: 16.38 GB in bfloat16, and 98.29 of fp32 weights and moments in a checkpoint
        ((), {}, 3 * 114.670 + 16.381),
        ((), {"schedule.num_kept_checkpoints": 1}, 2 * 114.670 + 16.381),
        ((), {"schedule.save_interval": 15}, 2 * 114.670 + 16.381),
        ((), {"schedule.save_interval": 16, "schedule.should_export_hf": False}, 2 * 114.670),
        ((), {"weight_sync.transport": "disk", "schedule.save_interval": 30}, 114.670 + 3 * 16.381),
        ((), {"algo.kl.placement": "loss", "schedule.save_interval": 30}, 114.670 + 16.381 + 16.381),
        ((), {"model.dtype": "float32", "schedule.save_interval": 30}, 131.052 + 32.763),
        ((), {"model.alphabet": "ab", "schedule.save_interval": 30}, 114.670 + 16.381 + 16.381),
        (("algo=ppo",), {"schedule.save_interval": 30}, 2 * 114.670 + 16.381),
        (("algo=sft",), {"weight_sync.transport": "disk", "schedule.save_interval": 30}, 114.670 + 16.381),
    ],
)
def test_disk_is_counted_as_a_run_fills_it(base, values, gigabytes):
    facts = facts_of(values, ("model=qwen3_8b", *APART, *base), (2,))
    assert compute_disk_bytes(facts.config, facts.shapes) == pytest.approx(gigabytes * 1e9, rel=1e-4)


def test_only_engines_of_the_trained_model_are_held_against_its_shapes():
    base = (
        "topology=multi_model",
        *(f"topology.served_models.{name}.path=x" for name in ("reference", "reward", "teacher")),
    )
    trained = {where for where, _ in list_trained(facts_of({}, base, (8,)).config)}
    assert trained == {MAIN}
    assert not list(list_trained(facts_of({}, EXTERNAL, (1,)).config))
    assert not list(list_trained(facts_of({f"{MAIN}.worker_type": "placeholder"}, APART, (2,)).config))


def test_disk_that_is_used_already_is_not_asked_for_again(tmp_path):
    rule = BY_NAME["disk_holds_the_run"]
    values = {"cluster.disk_bytes": 280_000_000_000, "run_dir": str(tmp_path)}
    base = ("model=qwen3_8b", "topology=disaggregated")
    assert list(rule.judge(facts_of(values, base, (2,))))
    checkpoint = Path(tmp_path) / "checkpoints" / "step_00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    assert not list(rule.judge(facts_of(values, base, (2,))))
