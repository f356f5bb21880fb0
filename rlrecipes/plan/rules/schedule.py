"""Lengths of a run, and what must be ready within them."""

from __future__ import annotations

from collections.abc import Iterator

from rlrecipes.config.schema import OptimConfig, RlConfig, RunConfig
from rlrecipes.plan.rules.rule import GROUP, Found, list_groups, rule
from rlrecipes.suggest import did_you_mean
from rlrecipes.tracking.metrics import find_metric, iterate_metrics


def _list_optimizers(config: RunConfig) -> Iterator[tuple[str, OptimConfig, int]]:
    """Path, section and train steps of the policy's optimizer and of the critic's, which may begin alone."""
    schedule = config.schedule
    critic = config.algo.critic if isinstance(config.algo, RlConfig) else None
    num_policy_steps = max(0, schedule.num_steps - (critic.num_warmup_steps if critic else 0))
    yield "optim", config.optim, num_policy_steps * schedule.num_train_steps
    if critic is not None:
        yield "algo.critic.optim", critic.optim, schedule.num_steps * schedule.num_train_steps


@rule("optim.min_lr", "algo.critic.optim.min_lr", fix="lower it")
def learning_rate_decays(config: RunConfig) -> Iterator[Found]:
    """A decay ends below its peak."""
    for where, optim, _ in _list_optimizers(config):
        if optim.min_lr > optim.lr:
            yield Found(f"{where}.min_lr", f"is {optim.min_lr}, above lr={optim.lr}")


@rule("optim.num_warmup_train_steps", "algo.critic.optim.num_warmup_train_steps", fix="lower it")
def warmup_ends_within_the_run(config: RunConfig) -> Iterator[Found]:
    """A warm-up that is longer than what its model trains never reaches the learning rate."""
    for where, optim, total in _list_optimizers(config):
        if optim.num_warmup_train_steps > total:
            problem = f"is {optim.num_warmup_train_steps}; its model has {total} train steps"
            yield Found(f"{where}.num_warmup_train_steps", problem)


@rule("deterministic", f"{GROUP}.engine", fix="use topology.device=cpu and engine=embedded, or deterministic=false")
def reruns_can_be_equal(config: RunConfig) -> Iterator[Found]:
    """Bit for bit equal are the CPU trainer and the embedded engine; the real SGLang's numbers depend on its batch."""
    if not config.deterministic:
        return
    if config.topology.device != "cpu":
        yield Found("deterministic", "bit-for-bit reruns are offered on CPU only", "use topology.device=cpu")
    for where, _, group in list_groups(config):
        if group.engine != "embedded":
            problem = "results of the real SGLang on CPU depend on its batch"
            yield Found(f"{where}.engine", problem, "use engine=embedded")


@rule("tracking.registered_model", fix="use tracking=mlflow schedule.should_export_hf=true, or set it to null")
def registered_model_is_exported(config: RunConfig) -> Iterator[Found]:
    """MLflow's registry gets what the end of the run exports."""
    name, tracking = config.tracking.registered_model, config.tracking
    if name is not None and not tracking.is_mlflow_enabled:
        yield Found("tracking.registered_model", f"is {name!r}; MLflow is off")
    elif name is not None and not config.schedule.should_export_hf:
        yield Found("tracking.registered_model", f"is {name!r}; the run exports no model")


@rule("pruner.metric", fix="name one of docs/metrics.md that says which direction is better")
def pruner_has_its_metric(config: RunConfig) -> Iterator[Found]:
    """Points are compared by a metric that every one logs on its way, and of which more or less is better."""
    if config.pruner is None:
        return
    name = config.pruner.metric
    metric = find_metric(name)
    evaluations = f"eval/{config.data.name}/"
    if metric is None:
        known = [entry.name.replace("<dataset>", config.data.name) for entry in iterate_metrics() if entry.better]
        yield Found("pruner.metric", f"{name!r} is no metric", did_you_mean(name, known))
    elif not metric.better:
        yield Found("pruner.metric", f"{name} is neither better high nor better low")
    elif not name.startswith("eval/"):
        return
    elif config.data.eval_path is None or config.schedule.eval_interval == 0:
        fix = "give schedule.eval_interval and data.eval_path, or another metric"
        yield Found("pruner.metric", f"{name} is not measured between the first and the last step", fix)
    elif not name.startswith(evaluations):
        yield Found("pruner.metric", f"{name} is of other data than {config.data.name}", f"name one of {evaluations}")


RULES = (
    learning_rate_decays,
    warmup_ends_within_the_run,
    reruns_can_be_equal,
    registered_model_is_exported,
    pruner_has_its_metric,
)
