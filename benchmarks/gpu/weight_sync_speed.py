"""Weight sync of a 4B-shaped model, in parts: handles of GPU memory to an engine on the trainer's GPU, NCCL to one on
another GPU.

The trainer's side is a Megatron model with random weights and no optimizer; everything from there on is what a run
does: names and shapes of HF, buckets, checksums, transports (``RankWorker.send_weights``), and the order of a sync
(``run_sync``) over HTTP to SGLang, which starts with ``load_format=dummy``. Ray is left out. References of the same
run: a copy on the device, and a bare broadcast by torch.distributed of the same bytes. Needs SGLang and megatron-core;
one GPU, or two for NCCL; no network::

    python benchmarks/gpu/weight_sync_speed.py [--tokenizer DIR] [--bucket-mib 256 1024 8192] [--budget-s 400]

Environment: MODEL stands for --tokenizer, an HF directory whose tokenizer is taken. ROLLOUT_PATH as in colocated.py.
Whatever happens, what was measured is printed, with the ends of the logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import functools
import inspect
import io
import json
import os
import pstats
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
from colocated import GROUP, RECIPE, SGLANG
from watched_run import ROOT, end, print_failure, read_used_mib

TAGS = ("weights", "kv_cache")
MIB = 1 << 20
COPY_BYTES = 4 << 30
STEP_TIMEOUT_S = 90.0
PROFILE_LINES = 16
NOT_MEASURED = {"cuda_graph_max_bs_decode", "mem_fraction_static"}
"""Options of colocated.py that only cost time here, or are others here."""


@dataclass
class Route:
    """One way to one engine.

    Attributes:
        name: for tables.
        plan: of a run that would take it.
        serving: its engine.
        worker: the trainer's side.
        reference: GB/s of the best that could be, and what that is.
    """

    name: str
    plan: Any
    serving: Any
    worker: Any = None
    reference: tuple[float, str] | None = None
    version: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


def build_overrides(arguments: argparse.Namespace, name: str, run_dir: Path) -> list[str]:
    """A recipe whose engine takes weights by that route."""
    found = [f"recipe={RECIPE}", f"run_dir={run_dir}", f"model={arguments.shapes}", "tracking=local"]
    found += [f"{GROUP}.start_timeout_s={0.6 * arguments.budget_s}", "parallel.max_tokens_per_micro_batch=4096"]
    if arguments.device == "cpu":
        return [*found, "topology=embedded", "cluster=host", f"weight_sync={name}", *arguments.overrides]
    found += ["cluster=h200_1"] if name == "tensor" else ["cluster=h200_2", f"{GROUP}.num_engines=1"]
    found += ["topology=" + ("colocated" if name == "tensor" else "disaggregated")]
    options = {key: value for key, value in SGLANG.items() if key not in NOT_MEASURED}
    options |= {
        "load_format": "dummy",
        "cuda_graph_backend_decode": "disabled",
        "mem_fraction_static": arguments.mem_fraction,
    }
    found += [f"+{GROUP}.sglang.{key}={value}" for key, value in options.items()]
    if path := os.environ.get("ROLLOUT_PATH"):
        found.append(f"+{GROUP}.env.PYTHONPATH={path}")
    return [*found, *arguments.overrides]


def build_plan(arguments: argparse.Namespace, name: str, directory: Path) -> Any:
    """Resolved, with the files that its engine reads."""
    from rlrecipes.config.compose import compose
    from rlrecipes.engines.megatron.initial import to_hf_config
    from rlrecipes.runner.preparation import run_preparation
    from rlrecipes.runner.resolution import resolve_recipe

    words = build_overrides(arguments, name, directory / name)
    if arguments.device == "cpu":
        plan = resolve_recipe(compose(words))
        run_preparation(plan, is_new=True)
        return plan
    model_dir = directory / "model"
    model_dir.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (Path(arguments.tokenizer) / file).is_file():
            shutil.copy(Path(arguments.tokenizer) / file, model_dir / file)
    model: Any = compose([*words, "model.path=unread"]).config.model
    (model_dir / "config.json").write_text(json.dumps(to_hf_config(model), indent=1))
    return resolve_recipe(compose([*words, f"model.path={model_dir}"]))


def count_gpus() -> int:
    """GPUs that this process may use."""
    if given := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len(given.split(","))
    with contextlib.suppress(pynvml.NVMLError):
        read_used_mib(1)
        return 2
    return 1


# ---- the trainer's side, in a thread of its own


def build_trainer(plan: Any) -> Any:
    """A trainer rank that has weights and nothing else."""
    from megatron.core import parallel_state

    from rlrecipes.engines.megatron.configuration import build_transformer_config
    from rlrecipes.engines.megatron.model import build_model
    from rlrecipes.engines.megatron.rank import TrainerRank
    from rlrecipes.engines.megatron.weights import WeightMap
    from rlrecipes.engines.sglang.process import find_free_port

    class WeightsAlone(TrainerRank):
        def __init__(self) -> None:
            self._trainer, self._model = plan.trainer, plan.model
            self._run_process_setup()
            config = build_transformer_config(plan.model, plan.trainer)
            self._init_process_group(0, f"tcp://127.0.0.1:{find_free_port()}")
            self._seed(0)
            chunks = build_model(plan.model, plan.trainer, config)
            for parameter in chunks[0].parameters():
                parameter.data.normal_(0.0, 0.02)
            self._weights = WeightMap(chunks, plan.model.shapes, parallel_state.get_tensor_model_parallel_group())

        def iter_hf_tensors(self) -> Iterator[tuple[str, Any]]:
            return self._weights.iter_hf_tensors()

    return WeightsAlone()


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def measure_copy() -> list[float]:
    """GB/s of one large copy on the device."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    found = []
    for _ in range(8):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        found.append(COPY_BYTES / 1e9 / (time.perf_counter() - started_s))
    del source, target
    torch.cuda.empty_cache()
    return found[3:]


class Stopwatch:
    """Seconds inside functions that are replaced for a while; the GPU is waited for at their ends.

    Args:
        device: ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.parts: dict[str, list[float]] = {}

    def add(self, part: str, started_s: float) -> None:
        """Count a call that ends now."""
        synchronize(self._device)
        self.parts[part].append(time.perf_counter() - started_s)

    def wrap(self, stack: contextlib.ExitStack, owner: Any, name: str, part: str, depth: int = 0) -> None:
        """Replace a function, coroutine function or maker of an iterator until ``stack`` closes."""
        original, part = getattr(owner, name), "\u2007" * 2 * depth + part
        self.parts.setdefault(part, [])

        @functools.wraps(original)
        def call(*arguments: Any, **keywords: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return original(*arguments, **keywords)
            finally:
                self.add(part, started_s)

        @functools.wraps(original)
        async def await_(*arguments: Any, **keywords: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return await original(*arguments, **keywords)
            finally:
                self.add(part, started_s)

        @functools.wraps(original)
        def iterate(*arguments: Any, **keywords: Any) -> Iterator[Any]:
            items = original(*arguments, **keywords)
            while True:
                started_s = time.perf_counter()
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self.add(part, started_s)
                yield item

        is_iterator = name.startswith("iter_")
        setattr(owner, name, iterate if is_iterator else await_ if inspect.iscoroutinefunction(original) else call)
        stack.callback(setattr, owner, name, original)

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Everything that a sync consists of; what is indented is inside of what is above it."""
        from rlrecipes.engines.megatron.weights import WeightMap
        from rlrecipes.engines.sglang.client import EngineClient
        from rlrecipes.runner.rank import RankWorker
        from rlrecipes.weight_sync import checksums, handles, tensor_hashes, transports

        for name in ("pause", "flush_cache", "begin_weight_update"):
            self.wrap(stack, EngineClient, name, name)
        self.wrap(stack, RankWorker, "send_weights", "send_weights")
        self.wrap(stack, WeightMap, "iter_hf_tensors", "names and shapes of HF", 1)
        for hasher in (tensor_hashes.TileHasher, tensor_hashes.Sha256Hasher):
            self.wrap(stack, hasher, "update", "hash tensors", 1)
            self.wrap(stack, hasher, "hexdigest", "hash: mix the sums", 1)
        self.wrap(stack, checksums, "bring_to_host", "hash: read the sums", 1)
        for transport in (handles.HandleTransport, transports.DistributedTransport, transports.TensorTransport):
            self.wrap(stack, transport, "send", "a bucket", 1)
        self.wrap(stack, handles.HandleTransport, "_share", "wait for the bucket and make handles", 2)
        self.wrap(stack, handles.HandleTransport, "_finish", "let go of the bucket", 2)
        self.wrap(stack, transports.DistributedTransport, "_broadcast", "broadcasts, this side", 2)
        for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
            self.wrap(stack, EngineClient, name, f"engine: {name}", 2)
        for name in ("end_weight_update", "update_weight_version", "weights_checksum", "continue_generation"):
            self.wrap(stack, EngineClient, name, name)


# ---- measuring


class Measurement:
    """Everything that is measured, in order, each part by itself.

    Args:
        arguments: of the command line.
        directory: for everything written.
    """

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments, self._directory = arguments, directory
        self._deadline_s = time.monotonic() + arguments.budget_s
        self._pool = ThreadPoolExecutor(1)
        self._gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
        self._routes: list[Route] = []

    async def run(self) -> None:
        """Start engines, measure, stop them."""
        from rlrecipes.runner.servers import Serving

        arguments = self._arguments
        has_other = arguments.device == "cpu" or count_gpus() > 1
        for name in ("tensor", "distributed") if has_other else ("tensor",):
            plan = build_plan(arguments, name, self._directory)
            self._routes.append(Route(name, plan, Serving(plan, print)))
        started_s = time.monotonic()
        try:
            for route in self._routes:
                route.serving.launch()
            trainer = await self._in_trainer(build_trainer, self._routes[0].plan)
            print(f"trainer after {time.monotonic() - started_s:.0f} s", flush=True)
            starting = (route.serving.wait_until_ready() for route in self._routes)
            ready = await asyncio.gather(*starting, return_exceptions=True)
            print(f"engines after {time.monotonic() - started_s:.0f} s", flush=True)
            for route, problem in zip(self._routes, ready, strict=True):
                if isinstance(problem, BaseException):
                    self._tell(f"route {route.name}", problem)
                else:
                    await self._measure_route(route, trainer)
        finally:
            for route in self._routes:
                print_rows(route)
            for route in self._routes:
                await asyncio.wait_for(route.serving.close(), 30)

    async def _in_trainer(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    def _tell(self, what: str, problem: BaseException) -> None:
        print(f"\n==== {what} failed", flush=True)
        traceback.print_exception(problem, limit=-4)
        sys.stderr.flush()

    async def _attempt(self, what: str, work: Awaitable[None]) -> None:
        """One part; what it raises ends it alone."""
        try:
            left_s = self._deadline_s - time.monotonic()
            if left_s < 5:
                print(f"{what}: no time was left", flush=True)
                if inspect.iscoroutine(work):
                    work.close()
                return
            await asyncio.wait_for(work, min(STEP_TIMEOUT_S, left_s))
        except Exception as problem:
            self._tell(what, problem)

    async def _measure_route(self, route: Route, trainer: Any) -> None:
        await self._attempt(f"{route.name}: connect", self._connect_trainer(route, trainer))
        if route.name == "tensor" and self._arguments.device == "cuda":
            await self._attempt("a copy on the device", self._measure_copy(route))
        if route.name == "distributed":
            await self._attempt("bare broadcast", self._measure_broadcast(route, trainer))
        for bucket_mib in self._arguments.bucket_mib:
            for should_verify in (False, True):
                what = f"{route.name}, buckets of {bucket_mib} MiB, checksums {should_verify}"
                await self._attempt(what, self._measure_syncs(route, bucket_mib, should_verify))
        for bucket_mib in (self._arguments.bucket_mib[0], self._arguments.bucket_mib[-1]):
            await self._attempt(f"{route.name}: parts", self._measure_parts(route, bucket_mib))
        await self._attempt(f"{route.name}: profile", self._profile(route))
        if route.name == "tensor" and self._arguments.device == "cuda":
            await self._attempt("release and resume", self._measure_memory(route))

    async def _connect_trainer(self, route: Route, trainer: Any) -> None:
        from rlrecipes.runner.rank import RankWorker

        def connect() -> None:
            worker = RankWorker(route.plan.model_dump_json(), 0, "127.0.0.1", 0, "127.0.0.1", str(self._arguments.log))
            worker._trainer = trainer
            worker.connect([(route.serving.updated_engines[0].url, 1, (0,))])
            route.worker = worker

        await self._in_trainer(connect)

    async def _sync(self, route: Route, bucket_mib: int, should_verify: bool) -> tuple[float, float, int]:
        """Seconds from pause to continue, of them sending, and bytes; the order of Loop._sync."""
        from rlrecipes.weight_sync.session import run_sync

        config = route.plan.weight_sync.model_copy(update={"bucket_bytes": bucket_mib * MIB})
        route.worker._plan = route.plan.model_copy(update={"weight_sync": config})
        route.version += 1
        sent: list[Any] = []

        async def send() -> dict[str, str]:
            started_s = time.perf_counter()
            checksums, num_bytes = await self._in_trainer(route.worker.send_weights, should_verify, True, 0)
            sent.extend((time.perf_counter() - started_s, num_bytes))
            return dict(checksums)

        started_s = time.perf_counter()
        await run_sync(
            [engine.client for engine in route.serving.updated_engines],
            send,
            version=route.version,
            pause_mode=config.pause_mode,
            should_bracket=True,
            should_verify=should_verify,
            timeout_s=STEP_TIMEOUT_S,
        )
        return time.perf_counter() - started_s, sent[0], sent[1]

    async def _measure_syncs(self, route: Route, bucket_mib: int, should_verify: bool) -> None:
        first_s, _, num_bytes = await self._sync(route, bucket_mib, should_verify)
        found = [await self._sync(route, bucket_mib, should_verify) for _ in range(self._arguments.repeats)]
        row = {"bucket_mib": bucket_mib, "should_verify": should_verify, "num_bytes": num_bytes, "first_s": first_s}
        row |= {"total_s": [one[0] for one in found], "send_s": [one[1] for one in found]}
        route.rows.append(row)
        totals = spread([1e3 * one[0] for one in found], ".1f")
        print(
            f"{route.name}, {bucket_mib} MiB, checksums {should_verify}: first {1e3 * first_s:.0f} ms, then {totals} ms"
        )
        sys.stdout.flush()

    async def _measure_parts(self, route: Route, bucket_mib: int) -> None:
        watch = Stopwatch(self._arguments.device)
        with contextlib.ExitStack() as stack:
            watch.watch(stack)
            total_s, *_ = await self._sync(route, bucket_mib, True)
        print(
            f"\n{route.name}, buckets of {bucket_mib} MiB: one sync with checksums, the GPU waited for in every part:"
        )
        print(f"\n| part | calls | ms |\n|---|---|---|\n| pause to continue | 1 | {1e3 * total_s:.1f} |")
        for part, seconds in watch.parts.items():
            if seconds:
                print(f"| {part} | {len(seconds)} | {1e3 * sum(seconds):.1f} |")
        sys.stdout.flush()

    async def _profile(self, route: Route) -> None:
        original, profiler = route.worker.send_weights, cProfile.Profile()
        route.worker.send_weights = functools.partial(profiler.runcall, original)
        try:
            await self._sync(route, self._arguments.bucket_mib[0], True)
        finally:
            del route.worker.send_weights
        out = io.StringIO()
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(PROFILE_LINES)
        print(f"\n{route.name}: the trainer's CPU in one sync with checksums")
        print("\n".join(line[:150] for line in out.getvalue().splitlines() if line.strip()), flush=True)

    async def _measure_copy(self, route: Route) -> None:
        rates = await self._in_trainer(measure_copy)
        route.reference = (statistics.median(rates), "copy on the device")
        print(f"a copy of {COPY_BYTES / 1e9:.1f} GB on the device: {spread(rates, ',.0f')} GB/s", flush=True)

    async def _measure_memory(self, route: Route) -> None:
        """Release and resume: both tags in one call, and one at a time."""
        client, gpu = route.serving.updated_engines[0].client, int(self._gpus[0])
        await client.pause("abort")
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for _ in range(self._arguments.repeats):
            for tags in (list(TAGS), [TAGS[0]], [TAGS[1]]):
                for what, act in (("release", client.release_memory), ("resume", client.resume_memory)):
                    before_mib, started_s = read_used_mib(gpu), time.perf_counter()
                    await act(tags)
                    time_s = time.perf_counter() - started_s
                    one = (time_s, read_used_mib(gpu) - before_mib)
                    found.setdefault((what, " and ".join(tags)), []).append(one)
        print("\n| engine | of | ms | MiB on the GPU, change |\n|---|---|---|---|")
        for (what, tags), values in found.items():
            change = statistics.median(value[1] for value in values)
            print(f"| {what} | {tags} | {spread([1e3 * value[0] for value in values], '.1f')} | {change:+,.0f} |")
        sys.stdout.flush()
        await self._sync(route, self._arguments.bucket_mib[-1], True)  # weights were undefined since
        print("weights were sent and compared again", flush=True)

    async def _measure_broadcast(self, route: Route, trainer: Any) -> None:
        from rlrecipes.engines.sglang.process import find_free_port

        def read_sizes() -> list[int]:
            return [tensor.numel() * tensor.element_size() for _, tensor in trainer.iter_hf_tensors()]

        sizes = self._directory / "sizes.json"
        sizes.write_text(json.dumps(await self._in_trainer(read_sizes)))
        port, processes, logs = find_free_port(), [], []
        for rank in (0, 1):
            command = [sys.executable, str(Path(__file__).with_name("bare_broadcast.py"))]
            command += ["--rank", str(rank), "--port", str(port), "--sizes", str(sizes)]
            command += ["--repeats", str(self._arguments.repeats)]
            command += ["--device", self._arguments.device, "--bucket-mib", *map(str, self._arguments.bucket_mib)]
            env = os.environ | {"CUDA_VISIBLE_DEVICES": self._gpus[rank]}
            log = self._directory / f"broadcast{rank}.log"
            logs.append(log)
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
                )
        try:
            codes = [await asyncio.to_thread(process.wait, 75) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    await asyncio.to_thread(end, process)
        text = logs[0].read_text()
        answers = [line for line in text.splitlines() if line.startswith("{")]
        if any(codes) or not answers:
            print(f"the bare broadcast ended with {codes}:\n{text[-2000:]}\n{logs[1].read_text()[-2000:]}", flush=True)
            return
        print("\n| bare broadcast, torch.distributed over NCCL | GB/s |\n|---|---|")
        rates: dict[str, list[float]] = json.loads(answers[-1])
        for what, values in rates.items():
            print(f"| {what} | {spread(values, ',.0f')} |", flush=True)
        best = max(rates, key=lambda what: statistics.median(rates[what]))
        route.reference = (statistics.median(rates[best]), f"bare broadcast, {best}")


def spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def print_rows(route: Route) -> None:
    """The table of one route."""
    rate, what = route.reference or (0.0, "(no reference)")
    print(f"\nRoute {route.name}; reference: {what}, {rate:,.0f} GB/s\n")
    print(
        "| buckets MiB | checksums | GB | first ms | pause to continue ms | sending ms | GB/s sending | of reference |"
    )
    print("|---" * 8 + "|")
    for row in route.rows:
        gigabytes, totals = row["num_bytes"] / 1e9, [1e3 * value for value in row["total_s"]]
        speed = gigabytes / statistics.median(row["send_s"])
        share = f"{speed / rate:.0%}" if rate else ""
        print(
            f"| {row['bucket_mib']:,} | {'yes' if row['should_verify'] else 'no'} | {gigabytes:.2f} "
            f"| {1e3 * row['first_s']:.0f} | {spread(totals, '.1f')} "
            f"| {spread([1e3 * value for value in row['send_s']], '.1f')} | {speed:.1f} | {share} |",
            flush=True,
        )


# ---- around it


def follow(path: Path, stop: threading.Event) -> None:
    """Print a growing file."""
    with path.open(errors="replace") as file:
        while True:
            is_last = stop.is_set()
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if is_last:
                return
            stop.wait(0.3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=os.environ.get("MODEL"), help="HF directory; MODEL of the environment")
    parser.add_argument("--shapes", default="qwen3_4b", help="an option of the group model")
    parser.add_argument("--bucket-mib", type=int, nargs="+", default=[256, 1024, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mem-fraction", type=float, default=0.6, help="of the GPU, for the engine")
    parser.add_argument("--budget-s", type=float, default=400.0, help="of everything, the engines' start included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a try with embedded engines")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further ones of the recipe")
    arguments = parser.parse_args()
    if arguments.log is not None:
        code = 1
        try:
            asyncio.run(Measurement(arguments, arguments.log.parent).run())
            code = 0
        except Exception:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)  # a thread that hangs in a collective would be waited for
    directory = Path(tempfile.mkdtemp(prefix="weight-sync-speed-"))
    log = directory / "output.log"
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": paths, "NCCL_CUMEM_ENABLE": "0"}  # as TrainerGroup sets it
    if arguments.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--log", str(log)],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stop = threading.Event()
    follower = threading.Thread(target=follow, args=(log, stop))
    follower.start()
    code: int | None = None
    try:
        code = process.wait(arguments.budget_s + 40)
    except subprocess.TimeoutExpired:
        print(f"not done after {arguments.budget_s:.0f} s", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            end(process) if code is None else os.killpg(process.pid, signal.SIGKILL)
        stop.set()
        follower.join(5)
    if code:
        for name in ("tensor", "distributed"):
            print_failure("", directory / name)
    return 1 if code is None else code


if __name__ == "__main__":
    sys.exit(main())
