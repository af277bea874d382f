"""`zerotune launch`: checks, environment, and the command to exec; no torch is imported here.

Each finding is one line: what is wrong and the remedy. A fatal finding stops the launch before training starts; a
warning says what will not work (tuning, mostly).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..store.errors import PlanError, PluginError, UserError
from ..store.job_options import NO_OPTIONS, JobOptions
from ..store.plan_file import read_plan
from . import reasons, settings
from .nccl import fabric as fabrics
from .nccl import library, memory, pinning
from .nccl.catalog import ASKS_CHUNK_SIZE_SINCE
from .nccl.compiled import EMULATED_NCCL
from .nccl.emulation_settings import EmulationSettings
from .nccl.libnccl import DISTRIBUTIONS
from .nccl.release import Release, release

SITE_DIR = Path(__file__).parent / "site"
OLDEST_NCCL = (2, 21)


@dataclass(frozen=True)
class Finding:
    """A problem that a check found."""

    text: str
    remedy: str
    fatal: bool

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}"


@dataclass(frozen=True)
class LaunchRequest:
    """The user's command and options."""

    command: Sequence[str]
    fabric: str | None = None
    """None: the real NCCL."""
    endpoint: str | None = None
    agent_on: bool = True
    """False: the untuned half of a comparison."""
    trace_dir: Path | None = None
    summary_path: Path | None = None
    plan_path: Path | None = None
    keys_dir: Path | None = None
    nccl_memory_mb: float | None = None
    """Limit of the device memory of a communicator's ring, which limits its channels."""
    name: str | None = None
    is_quiet: bool = False
    """The job ends without the line that says what was tuned."""
    is_exact: bool = False
    """Only settings that cannot change a bit of the results are tuned."""
    job_options: JobOptions = NO_OPTIONS
    training: str = ""
    """Identifies starts of the same training; empty: the environment is not tuned."""
    proposed_environment: str = ""
    marks_dir: Path | None = None
    """Folder for the marks (`zerotune.agent.reasons.Mark`) of the job's processes."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


def check(request: LaunchRequest, *, daemon_answers: bool, silent: UserError | None = None) -> list[Finding]:
    """Everything that prevents a tuned run, fatal findings first.

    Args:
        daemon_answers: a daemon answers, or will be started.
        silent: describes a daemon that listens but does not answer; None: no daemon listens.
    """
    problems = _command_problems(request)
    if request.fabric is not None:
        problems += _fabric_problems(request.fabric, request)
    if request.plan_path is not None:
        problems += _plan_problems(request.plan_path, request.fabric)
    if request.agent_on:
        problems += _plugin_problems(request) + _setting_problems(request) + _tick_problems(request.environment)
        if request.fabric is None:
            problems += _nccl_problems(request.job_options.chunk_sizes)
        elif request.job_options.chunk_sizes:
            problems += _chunk_problems(release(request.environment))
        if not daemon_answers and request.plan_path is None:
            problems.append(_untuned(endpoint(request), silent))
    return sorted(problems, key=lambda problem: not problem.fatal)


def _untuned(where: str, silent: UserError | None) -> Finding:
    if silent is not None:
        return Finding(silent.problem, f"training runs untuned until it answers: {silent.remedy}", fatal=False)
    if where.startswith("tcp://"):
        remedy = "training runs untuned until one does; start one there, or give its keys with --curve-keys"
        return Finding(f"no daemon answers at {where}, or it has other keys", remedy, fatal=False)
    remedy = "training runs untuned; start one with `zerotune daemon`, or leave --no-daemon out"
    return Finding(f"no daemon answers at {where}", remedy, fatal=False)


def endpoint(request: LaunchRequest) -> str:
    """The daemon's endpoint that this launch will use."""
    return request.endpoint or settings.AgentSettings.from_environment(request.environment).endpoint


def make_writable(folder: Path) -> None:
    """Create `folder` if need be, and check like `check_writable` that a file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder}: {error.strerror}", "choose another") from error
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Raise `UserError` if no file can be written in `folder`."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "choose another folder" if folder.is_dir() else "create the folder or name another"
        raise UserError(f"cannot write to {folder}: {error.strerror}", remedy) from error


def environment(request: LaunchRequest) -> dict[str, str]:
    """The environment for the command."""
    env = dict(request.environment)
    env[settings.ENV_LAUNCH] = "1"
    env[settings.ENV_AGENT] = "1" if request.agent_on else "0"
    env[settings.ENV_ENDPOINT] = endpoint(request)
    env.setdefault(settings.ENV_JOB_ID, settings.new_job_id())
    if request.name is not None:
        env[settings.ENV_JOB_NAME] = request.name
    optional = {
        settings.ENV_FABRIC: request.fabric,
        settings.ENV_TRACE_DIR: request.trace_dir and request.trace_dir.absolute(),
        settings.ENV_SUMMARY: request.summary_path and request.summary_path.absolute(),
        settings.ENV_PLAN: request.plan_path and request.plan_path.absolute(),
        settings.ENV_NUMERICS: settings.EXACT if request.is_exact else None,
        settings.ENV_TRAINING: request.training or None,
        settings.ENV_PROPOSED: request.proposed_environment or None,
        settings.ENV_SHADOW: "1" if request.job_options.shadow else None,
        settings.ENV_TUNE_FOR: request.job_options.tune_steps or None,
        settings.ENV_COMPARE: request.job_options.compare_steps or None,
        settings.ENV_OWN_STEPS: request.job_options.own_steps or None,
        settings.ENV_CHUNK_SIZES: "1" if request.job_options.chunk_sizes else None,
        reasons.QUIET: "1" if request.is_quiet else None,
        reasons.MARKS: request.marks_dir,
        settings.ENV_CURVE_KEYS: request.keys_dir and request.keys_dir.absolute(),
    }
    for name, value in optional.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = str(value)
    if request.nccl_memory_mb is not None:
        env.setdefault("NCCL_MAX_CTAS", str(_channels_within(request.nccl_memory_mb, request.fabric)))
    # NCCL's variables for plugins are left as the user set them: each rank's agent changes them in its own process.
    # Only the folder of sitecustomize.py is added: the script's Python has zerotune installed.
    entries = [str(SITE_DIR), *env.get("PYTHONPATH", "").split(os.pathsep)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(entry for entry in entries if entry))
    settings.pack_variables(env)
    return env


def _channels_within(limit_mb: float, fabric: str | None) -> int:
    if fabric is None:
        return memory.channels_within(limit_mb)
    has = fabrics.load(fabric).memory
    return memory.channels_within(limit_mb, has.channel_mb, has.algorithm_mb)


def _command_problems(request: LaunchRequest) -> list[Finding]:
    if not request.command:
        return [Finding("no command to launch", "give it after `--`: zerotune launch -- torchrun train.py", True)]
    program = request.command[0]
    if len(program.split()) > 1 and shutil.which(program.split()[0], path=request.environment.get("PATH")):
        return [Finding(f"command {program!r} is one word", "leave the quotes out", True)]
    if program.endswith(".py") and not os.access(program, os.X_OK):
        script = shlex.quote(program)
        return [Finding(f"command {program!r} is a script", f"put its interpreter before it: `python {script}`", True)]
    if shutil.which(program, path=request.environment.get("PATH")) is None:
        # As in a shell, a word with a slash is a path, and all other words are looked up in PATH.
        if os.sep in program and Path(program).is_file():
            remedy = f"run `chmod +x {shlex.quote(program)}`, or put its interpreter before it"
            return [Finding(f"command {program!r} is not executable", remedy, True)]
        return [Finding(f"command {program!r} is not found", "check its spelling and PATH", True)]
    return [
        Finding(f"script {argument} does not exist", "check the path", True)
        for argument in _scripts(request.command)[:1]
        if not argument.exists()
    ]


def _scripts(command: Sequence[str]) -> list[Path]:
    # A word with spaces is a shell's command line: bash -c "python train.py".
    words = (word for word in command[1:] if word.endswith(".py") and len(word.split()) == 1)
    return [Path(word) for word in words if not word.startswith("-")]


def _asked_ranks(command: Sequence[str]) -> int:
    """Number of ranks in torchrun's options; 0: unknown."""
    found = {"nnodes": 1, "nproc_per_node": 0}
    for word, following in itertools.pairwise([*command, ""]):
        if word.endswith(".py"):
            break  # further options are the script's
        option, equals, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        value = (value if equals else following).partition(":")[0]  # an elastic job's least number
        if option.startswith("--") and name in found and value.isascii() and value.isdigit():
            found[name] = int(value)
    return found["nnodes"] * found["nproc_per_node"]


def _fabric_problems(name: str, request: LaunchRequest) -> list[Finding]:
    try:
        fabrics.load(name).refuse_more(_asked_ranks(request.command))
        EmulationSettings.from_environment(request.environment)
    except UserError as error:
        return [Finding(error.problem, error.remedy, fatal=True)]
    try:
        EMULATED_NCCL.build()
    except PluginError as error:
        return [Finding(str(error), "the emulated NCCL cannot run without it", fatal=True)]
    return []


def _plan_problems(path: Path, fabric: str | None) -> list[Finding]:
    try:
        file = read_plan(path)
        library.load().load_plan(file.plan)
    except PlanError as error:
        # The plugin's own error does not name the file.
        where = "" if str(path) in error.problem else f"{path}: "
        return [Finding(where + error.problem, error.remedy, fatal=True)]
    except PluginError:
        return []  # `_plugin_problems` reports it
    if not file.plan.rows:
        # `zerotune store export` writes such a file if nothing was better than NCCL's own choice.
        return [Finding(f"{path} has no rows", "training runs as NCCL itself chooses", fatal=False)]
    if file.emulated and file.emulated != fabric:
        here = f"on fabric {fabric}" if fabric else "on real hardware"
        return [
            Finding(
                f"{path} was learned on the emulated fabric {file.emulated} and runs {here}",
                "what was best there need not be good here",
                fatal=False,
            )
        ]
    return []


def _plugin_problems(request: LaunchRequest) -> list[Finding]:
    try:
        library.load()
    except PluginError as error:
        return [Finding(str(error), "training runs untuned", fatal=False)]
    return []


def _setting_problems(request: LaunchRequest) -> list[Finding]:
    """The user's own settings that make a collective impossible, or only prevent its tuning."""
    environment = request.environment
    pinned = {name: value for name in pinning.PINNING if (value := environment.get(name))}
    if not pinned:
        return []
    words, names = " ".join(f"{name}={value}" for name, value in pinned.items()), " and ".join(pinned)
    try:
        unserved = pinning.unserved(environment)
    except UserError as error:
        return [Finding(f"{words}: {error.problem}", f"{error.remedy}, or unset {names}", fatal=False)]
    if unserved:
        # Ring with all protocols can run every collective, whatever else the user asks for.
        remedy = "NCCL 2.24 or newer ends the job there; let them have ring too (NCCL_ALGO=Tree,Ring for example)"
        what = " and ".join(one.name for one in unserved)
        return [
            Finding(f"{words} leaves no algorithm to {what} of FSDP and ZeRO", f"{remedy}, or unset {names}", False)
        ]
    return [
        Finding(
            f"{name}={value} pins what NCCL may choose",
            f"only what it allows can be tuned; unset {name} to tune all",
            fatal=False,
        )
        for name, value in pinned.items()
    ]


def _tick_problems(environment: Mapping[str, str]) -> list[Finding]:
    text = environment.get(settings.ENV_TICK_MS, "")
    if not text or settings.tick_of(text) is not None:
        return []
    remedy = f"the agent reports every {settings.DEFAULT_TICK_MS} ms; give a whole number above 0, or unset it"
    return [Finding(f"{settings.ENV_TICK_MS}={text} is not a number of milliseconds", remedy, fatal=False)]


def _nccl_problems(chunk_sizes: bool) -> list[Finding]:
    installed = _installed_nccl()
    if installed is None:
        return [
            Finding(
                "this torch brings no NCCL package of its own",
                "a system NCCL is checked when it loads; without a GPU add --fabric (see `zerotune hardware`)",
                fatal=False,
            )
        ]
    if installed.version < OLDEST_NCCL:
        return [
            Finding(
                f"{installed} has no tuner plugin interface that is supported",
                f"install torch with NCCL {OLDEST_NCCL[0]}.{OLDEST_NCCL[1]} or newer",
                fatal=False,
            )
        ]
    return _chunk_problems(installed) if chunk_sizes else []


def _chunk_problems(nccl: Release) -> list[Finding]:
    if nccl.tuner_abi >= ASKS_CHUNK_SIZE_SINCE:
        return []
    remedy = "--chunk-sizes has no effect here; it needs NCCL 2.30 or newer"
    return [Finding(f"{nccl} takes no chunk size from a plugin", remedy, fatal=False)]


def _installed_nccl() -> Release | None:
    """The release of the installed NCCL package; None: there is none."""
    for distribution in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers = re.findall(r"\d+", importlib.metadata.version(distribution))
            return Release(tuple(map(int, numbers[:3])))
    return None


def refuse_fatal(problems: Sequence[Finding]) -> None:
    """Raise the first fatal finding as a `UserError`."""
    for problem in problems:
        if problem.fatal:
            raise UserError(problem.text, problem.remedy)
