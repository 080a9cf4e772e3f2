"""The trainer's settings: a TOML file, checked before anything starts."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from pipeswift import codec, schedules
from pipeswift.errors import PipeSwiftError
from pipeswift.ir import Schedule
from pipeswift.policy import Swift, check_replan
from pipeswift.train.misfit import explain
from pipeswift.verify import InvalidSchedule, check
from pipeswift.versions import VersionError, versions

NonNegative = Annotated[int, Field(ge=0)]
PathSetting = Annotated[Path, Field(strict=False)]


def _partition(value: Any) -> Any:
    if value in ("profile", "even"):
        return value
    if isinstance(value, list | tuple) and value and all(type(size) is int and size > 0 for size in value):
        return tuple(value)
    raise ValueError('should be "profile", "even", or the number of layers of each stage, such as [2, 1, 1, 2]')


Partition = Annotated[str | Annotated[tuple[int, ...], Field(strict=False)], BeforeValidator(_partition)]


def _expert_chunks(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value > 0):
        return value
    raise ValueError('should be "auto", or a number of chunks, such as 2')


ExpertChunks = Annotated[int | Literal["auto"], BeforeValidator(_expert_chunks)]


class ConfigError(PipeSwiftError):
    """A settings file that cannot be read, or settings that do not fit."""


class Section(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Model(Section):
    """The model is an embedding, `blocks` transformer blocks and a head: blocks + 2 layers to cut into stages.

    vocabulary: rows of the embedding and of the head. Bytes need 256; with more, the head weighs what a larger
    vocabulary's would, and the model learns that the rest does not occur.

    With `experts` above 0 each block's MLP is a mixture of that many experts of inner width `expert_width` (0: an
    MLP's, shared out over a token's `top_k`), and perhaps one of `shared_width` for all tokens; see `pipeswift.moe`.
    skew, skew_strength: for experiments, favourites of the routers, `skew_strength` in logits, by default 2.
    """

    blocks: PositiveInt = 4
    width: PositiveInt = 128
    heads: PositiveInt = 4
    context: PositiveInt = 128  # bytes
    vocabulary: Annotated[int, Field(ge=256)] = 256
    experts: NonNegative = 0
    top_k: PositiveInt = 2
    expert_width: NonNegative = 0
    shared_width: NonNegative = 0
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    balance: Annotated[float, Field(ge=0)] = 0.01
    z: Annotated[float, Field(ge=0)] = 0.001
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    capacity_factor: PositiveFloat | None = None
    overflow: Literal["drop", "residual"] = "drop"
    placement: Literal["contiguous", "random"] = "contiguous"
    payload: Literal["full", "bfloat16"] = "full"
    skew: Literal["fixed", "drifting", "bursty"] | None = None
    skew_strength: PositiveFloat | None = None

    @property
    def layers(self) -> int:
        return self.blocks + 2

    @property
    def shape(self) -> dict[str, Any]:
        """What `train.model.builders` takes."""
        names = ("blocks", "width", "heads", "context", "vocabulary")
        return {name: getattr(self, name) for name in names} | {"experts": self.mixture}

    @property
    def mixture(self) -> dict[str, Any] | None:
        """What `train.model.expert_block` takes of its experts; None for a dense model."""
        if not self.experts:
            return None
        routing = ("experts", "top_k", "scoring", "balance", "z", "jitter", "capacity_factor", "overflow")
        names = (*routing, "placement", "payload")
        hidden = self.expert_width or 4 * self.width // self.top_k
        more = {
            "hidden": hidden,
            "shared": self.shared_width,
            "skew": self.skew and (self.skew, self.skew_strength or 2.0),
        }
        return {name: getattr(self, name) for name in names} | more


class Data(Section):
    """path: a text file or a folder of them; left out, the Python standard library's own source."""

    path: PathSetting | None = None


class Train(Section):
    """A step is one optimizer step over `batch` sequences: `accumulate` flushes of `microbatches` micro-batches on
    each replica of the pipeline.

    Without flush (pipeline.schedule = "pipedream") a step is one order of `microbatches` micro-batches with an update
    every `pipeline.updates_every` of them, and clip_norm bounds the norm of each stage's gradients on its own.
    staleness_correction: steps over which a stale gradient's smaller rate grows back to the usual; 0 for none.
    """

    steps: PositiveInt = 140
    batch: PositiveInt = 64
    microbatches: PositiveInt = 8
    accumulate: PositiveInt = 1
    lr: PositiveFloat = 4e-3
    warmup: NonNegative = 20  # steps from 0 to lr
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.05  # share of lr that the cosine ends at
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: PositiveFloat = 1.0
    staleness_correction: NonNegative = 0
    seed: NonNegative = 0
    eval_every: PositiveInt = 28
    eval_batches: PositiveInt = 4


class Pipeline(Section):
    """pp: ranks of a pipeline. dp: its replicas, which share every batch; a run has pp x dp processes.
    ep: neighbouring replicas that share out a model's experts. expert_chunks: groups of a rank's experts, so that
    sending tokens of one hides behind the compute of another; "auto" finds, after the first step, how many pay.

    chunks: stages per rank, for schedules with a choice. threads: of each rank.
    partition: "profile" cuts the model so that the slowest stage is as fast as can be, by times that rank 0 measures
    at the start; "even" gives each stage as many blocks; a list gives the layers of each stage.
    weights, updates_every: for schedules without flush, which version of its weights a stage uses for a micro-batch,
    and how many micro-batches make an update; by default stash and 1.
    policy, in_flight: swift leaves the schedule's order where stage times swing, replan finds another between steps
    when stage times have changed, and both then hold at most so many micro-batches per stage; by default as many as
    the schedule.
    batched_weight_gradients: W that follow each other run as one product; gradients are then equal within rounding.
    """

    pp: PositiveInt = 4
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    expert_chunks: ExpertChunks = "auto"
    schedule: str = "1f1b"
    chunks: PositiveInt | None = None
    partition: Partition = "profile"
    weights: Literal["stash", "vertical", "2bw", "none"] | None = None
    updates_every: PositiveInt | None = None
    policy: Literal["follow", "swift", "replan"] = "follow"
    in_flight: PositiveInt | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    batched_weight_gradients: bool = False


class Run(Section):
    """folder: where the run's files go; when it is taken, a number is added to the name."""

    folder: PathSetting = Path("runs/train")


class Config(Section):
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    pipeline: Pipeline = Pipeline()
    run: Run = Run()

    @property
    def microbatch(self) -> int:
        """Samples in a micro-batch."""
        return self.train.batch // (self.train.accumulate * self.train.microbatches * self.pipeline.dp)

    def build_schedule(self) -> Schedule:
        """The schedule that the settings name, or the one in their file, whose size has to agree.

        Raises ConfigError when there is none, when the numbers do not fit it, or when the file's cannot run.
        """
        pipeline = self.pipeline
        try:
            if pipeline.schedule.lower().endswith((".csv", ".json")):
                return self._load_schedule()
            return schedules.build(pipeline.schedule, pipeline.pp, self.train.microbatches, pipeline.chunks)
        except (schedules.ScheduleError, codec.ScheduleFileError, InvalidSchedule) as error:
            raise ConfigError(f"pipeline.schedule: {_in_settings(str(error))}") from error

    def _load_schedule(self) -> Schedule:
        pipeline = self.pipeline
        schedule = codec.load(pipeline.schedule)
        for setting, given, found in (
            ("pipeline.pp", pipeline.pp, schedule.num_ranks),
            ("train.microbatches", self.train.microbatches, schedule.num_microbatches),
            ("pipeline.chunks", pipeline.chunks, schedule.chunks),
        ):
            if given not in (None, found):
                raise ConfigError(
                    f"{setting} = {given}, but the schedule in {pipeline.schedule} has {found}: use {setting} = {found}"
                )
        check(schedule)
        return schedule

    def agreement(self) -> dict[str, object]:
        """What must be equal on all ranks, by setting: all but paths, which may differ from host to host."""
        sections = self.model_dump(include={"model", "train", "pipeline"})
        return {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The settings in `path`, with overrides such as "train.steps=5" laid over them, checked.

    Raises ConfigError, which names the setting, its value, the rule and a valid value.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no settings file {path}: give a TOML file, for example examples/quickstart.toml"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as a settings file: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for override in overrides:
        _lay_over(settings, override)
    return parse(settings)


def parse(settings: Mapping[str, Any]) -> Config:
    """Settings, by section, as a Config. Raises ConfigError as `load` does."""
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, Config) for problem in error.errors())) from error
    _check(config)
    return config


def dumps(config: Config) -> str:
    """The settings as TOML, defaults written out; `load` reads it back."""
    lines: list[str] = []
    for name, section in config.model_dump(mode="json", exclude_none=True).items():
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in section.items()),
            "",
        ]
    return "\n".join(lines)


def _check(config: Config) -> None:
    """The rules that tie settings together."""
    model, train, pipeline = config.model, config.train, config.pipeline
    if model.width % (2 * model.heads):
        raise ConfigError(
            f"model.width = {model.width} is not a multiple of 2 x model.heads = {2 * model.heads}: every head takes "
            f"an even share. Use model.width = {_multiple(model.width, 2 * model.heads)}."
        )
    unit = train.microbatches * train.accumulate * pipeline.dp
    if train.batch % unit:
        names, sizes = "train.accumulate x train.microbatches", f"{train.accumulate} x {train.microbatches}"
        if pipeline.dp > 1:
            names, sizes = f"pipeline.dp x {names}", f"{pipeline.dp} x {sizes}"
        raise ConfigError(
            f"train.batch = {train.batch} does not divide into {names} = {sizes} equal parts. Use train.batch = "
            f"{_multiple(train.batch, unit)}."
        )
    schedule = config.build_schedule()
    _check_experts(model, pipeline)
    _check_flush(config, schedule)
    _check_policy(pipeline, schedule)
    stages = schedule.num_stages
    if model.layers < stages:
        raise ConfigError(
            f"model.blocks = {model.blocks} makes {model.layers} layers (embedding, blocks, head), fewer than the "
            f"{stages} stages of {pipeline.schedule} with pipeline.pp = {pipeline.pp}. Every stage needs a layer: use "
            f"model.blocks = {stages - 2} or more."
        )
    partition = pipeline.partition
    if not isinstance(partition, str) and (len(partition) != stages or sum(partition) != model.layers):
        raise ConfigError(
            f"pipeline.partition = {list(partition)} does not share out {model.layers} layers (embedding, blocks, "
            f"head) over {stages} stages. Use {stages} numbers that add up to {model.layers}, such as "
            f"pipeline.partition = {[*[1] * (stages - 1), model.layers - stages + 1]}."
        )


def _check_experts(model: Model, pipeline: Pipeline) -> None:
    if pipeline.dp % pipeline.ep:
        raise ConfigError(
            f"pipeline.ep = {pipeline.ep} does not divide pipeline.dp = {pipeline.dp}: replicas share out experts in "
            f"groups of ep. Use pipeline.dp = {_multiple(pipeline.dp, pipeline.ep)}."
        )
    if model.experts % pipeline.ep:
        raise ConfigError(
            f"model.experts = {model.experts} do not spread evenly over pipeline.ep = {pipeline.ep} ranks. Use "
            f"model.experts = {_multiple(model.experts, pipeline.ep)}."
        )
    if model.experts and model.top_k > model.experts:
        raise ConfigError(f"model.top_k = {model.top_k} is above model.experts = {model.experts}. Use model.top_k = 1.")
    if model.skew_strength and not model.skew:
        raise ConfigError(
            f"model.skew_strength = {model.skew_strength} is that of a skew, but there is none: leave it out, or set "
            'model.skew = "fixed", say'
        )
    if model.skew and not model.experts:
        raise ConfigError(
            f'model.skew = "{model.skew}" gives routers favourites, but model.experts = 0 makes a model without: leave '
            "it out, or use model.experts = 4"
        )
    chunks, held = pipeline.expert_chunks, model.experts // pipeline.ep
    if model.experts and chunks != "auto" and chunks > held:
        raise ConfigError(
            f"pipeline.expert_chunks = {chunks} are groups of the {held} experts that a rank holds "
            f"(model.experts / pipeline.ep). Use pipeline.expert_chunks = {held} at most."
        )


def _check_flush(config: Config, schedule: Schedule) -> None:
    """Settings that belong to schedules with a flush, or to those without."""
    train, pipeline = config.train, config.pipeline
    if not schedule.flush:
        try:
            versions(schedule, pipeline.weights or "stash", pipeline.updates_every or 1)
        except VersionError as error:
            raise ConfigError(f"pipeline.updates_every, pipeline.weights: {error}") from error
        if pipeline.dp > 1:
            raise ConfigError(
                f"pipeline.dp = {pipeline.dp} replicas reduce gradients at a flush, and {pipeline.schedule} has none: "
                "use pipeline.dp = 1"
            )
        if train.accumulate > 1:
            raise ConfigError(
                f"train.accumulate = {train.accumulate} adds up gradients over flushes, and {pipeline.schedule} has "
                "none: use train.accumulate = 1, and pipeline.updates_every for larger updates"
            )
        return
    for setting, value in (
        ("pipeline.weights", pipeline.weights),
        ("pipeline.updates_every", pipeline.updates_every),
        ("train.staleness_correction", train.staleness_correction),
    ):
        if value:
            raise ConfigError(
                f"{setting} = {json.dumps(value)} is for schedules without flush: leave it out, or use "
                f'pipeline.schedule = "pipedream" instead of "{pipeline.schedule}"'
            )


def _check_policy(pipeline: Pipeline, schedule: Schedule) -> None:
    if pipeline.policy != "follow":
        try:
            Swift(schedule) if pipeline.policy == "swift" else check_replan(schedule, pipeline.in_flight)
        except PipeSwiftError as error:
            raise ConfigError(f'pipeline.policy = "{pipeline.policy}": {error}') from error
    elif pipeline.in_flight is not None:
        raise ConfigError(
            f"pipeline.in_flight = {pipeline.in_flight} limits a policy that adapts: leave it out, or use "
            'pipeline.policy = "swift" or "replan"'
        )


def _multiple(value: int, unit: int) -> int:
    """The multiple of `unit` nearest to `value`, at least one unit."""
    return max(round(value / unit), 1) * unit


def _lay_over(settings: dict[str, Any], override: str) -> None:
    setting, equals, text = override.partition("=")
    section, dot, key = setting.strip().partition(".")
    if not (equals and dot and section and key) or not isinstance(settings.setdefault(section, {}), dict):
        raise ConfigError(
            f"--set {override} is not a setting: write SECTION.KEY=VALUE, for example --set train.steps=5"
        )
    try:
        settings[section][key] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        settings[section][key] = text.strip()  # a bare word is a string


def _in_settings(text: str) -> str:
    """An error of the schedules, which speak of command line options, in the names of the settings file."""
    names = (("--pp", "pipeline.pp"), ("--microbatches", "train.microbatches"), ("--chunks", "pipeline.chunks"))
    for option, setting in names:
        text = text.replace(option, setting)
    return text
