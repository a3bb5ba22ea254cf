"""serving/repository.py, plan.py, repository_lint.py: what is rendered fits together, and a misfit is found offline."""

import dataclasses
import json

import pytest
from google.protobuf import text_format
from small_repository import SENTENCE, SPAN, add_plan, engine_facts, make_export
from tritonclient.grpc import model_config_pb2 as pb

from bertship.errors import CheckFailed, InputError
from bertship.tasks import TASKS
from bertship.triton_limits import MAX_ROWS, PLAN_MAX_BATCH
from serving import repository
from serving.plan import Plan, default_plan, plan_of, read_plan
from serving.repository import render, render_files
from serving.repository_lint import WORLDS, lint, lint_repository, models_of, read_config
from serving.warmup import warmed_shapes


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_what_is_rendered_has_no_fault(task):
    assert lint(render_files(task), task.name, default_plan(task)) == []


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_one_encoder_in_three_worlds(task):
    files = render_files(task)
    configs = {world: read_config(files, f"{task.name}_encode", world) for world in WORLDS}
    assert [(c.platform, c.backend) for c in configs.values()] == [
        ("tensorrt_plan", ""),
        ("onnxruntime_onnx", "onnxruntime"),
        ("", "python"),
    ]
    assert [c.max_batch_size for c in configs.values()] == [PLAN_MAX_BATCH, PLAN_MAX_BATCH, MAX_ROWS]
    assert [all(i.allow_ragged_batch for i in c.input) for c in configs.values()] == [False, False, True]
    assert list(configs[""].instance_group[0].profile) == [str(i) for i in range(len(task.buckets))]
    padded = {(rows, bucket) for rows in (1, PLAN_MAX_BATCH) for bucket in task.buckets}
    assert warmed_shapes(configs[""]) == warmed_shapes(configs["onnxruntime"]) == padded
    assert warmed_shapes(configs["embedded"]) == {(1, task.max_tokens), (2, task.max_tokens)}
    # srv.7: one instance each, and a resource of which there is one in all
    for world in ("onnxruntime", "embedded"):
        (group,) = configs[world].instance_group
        assert group.count == 1
        assert [(r.name, r.count, getattr(r, "global")) for r in group.rate_limiter.resources] == [("cores", 1, True)]


def edited(files, path, change):
    config = text_format.Parse(files[path], pb.ModelConfig())
    change(config)
    return files | {path: text_format.MessageToString(config)}


def rewire(config, step, tensor):
    step = config.ensemble_scheduling.step[step]
    step.input_map[tensor] = "nothing"


def drop(field, place=0):
    return lambda config: getattr(config, field).__delitem__(place)


ENSEMBLE, TOKENIZE, ENCODE, DECODE = ("finder", "finder_tokenize", "finder_encode", "finder_decode")
FAULTS = {
    "a step's input from nowhere": (
        ENSEMBLE,
        "config",
        lambda c: rewire(c, 1, "input_ids"),
        "nothing, for input input_ids of finder_encode, comes from no earlier step",
    ),
    "an input left out": (
        ENSEMBLE,
        "config",
        lambda c: c.ensemble_scheduling.step[2].input_map.pop("OFFSETS"),
        "input OFFSETS of finder_decode gets nothing",
    ),
    "an unknown input": (
        ENSEMBLE,
        "config",
        lambda c: c.ensemble_scheduling.step[0].input_map.__setitem__("TEXTS", "QUESTION"),
        "finder_tokenize has no input TEXTS",
    ),
    "an unknown output": (
        ENSEMBLE,
        "config",
        lambda c: c.ensemble_scheduling.step[0].output_map.__setitem__("IDS", "ids"),
        "finder_tokenize has no output IDS",
    ),
    "an unknown step": (
        ENSEMBLE,
        "config",
        lambda c: setattr(c.ensemble_scheduling.step[2], "model_name", "finder_answer"),
        "step finder_answer is no model of this task",
    ),
    "an output that nobody makes": (
        ENSEMBLE,
        "config",
        lambda c: c.output.add(name="MORE", data_type=pb.TYPE_STRING, dims=[-1]),
        "no step makes output MORE",
    ),
    "a tensor made twice": (
        ENSEMBLE,
        "config",
        lambda c: c.ensemble_scheduling.step[1].output_map.__setitem__("start_logits", "OWNER"),
        "OWNER is made twice",
    ),
    "srv.3: ragged on an ensemble": (
        ENSEMBLE,
        "config",
        lambda c: setattr(c.input[0], "allow_ragged_batch", True),
        "finder: allow_ragged_batch of input QUESTION is ignored on an ensemble; remove it",
    ),
    "srv.4: an ensemble's warm-up": (
        ENSEMBLE,
        "config",
        lambda c: c.model_warmup.add(name="x"),
        "finder: Triton refuses warm-up of an ensemble",
    ),
    "a batching ensemble": (ENSEMBLE, "config", lambda c: setattr(c, "max_batch_size", 8), "max_batch_size 8"),
    "another type": (
        TOKENIZE,
        "config",
        lambda c: setattr(c.output[0], "data_type", pb.TYPE_INT32),
        "finder_encode's input input_ids is TYPE_INT64, finder_tokenize gives TYPE_INT32",
    ),
    "another shape": (
        DECODE,
        "config",
        lambda c: c.input[3].dims.__setitem__(2, 3),
        "finder_decode's input OFFSETS has the shape [-1, -1, 3], finder_tokenize gives [-1, -1, 2]",
    ),
    "srv.4: no warm-up": (
        DECODE,
        "config",
        lambda c: c.ClearField("model_warmup"),
        "finder_decode: no warm-up, so its first requests would be slow",
    ),
    "srv.4: a bucket that stays cold": (
        ENCODE,
        "config",
        drop("model_warmup"),
        "finder_tokenize and finder_encode: no warm-up at 1 rows of 12 tokens",
    ),
    "more instances": (
        ENCODE,
        "configs/embedded",
        lambda c: setattr(c.instance_group[0], "count", 3),
        "finder_encode: [3] instances are named",
    ),
    "instances left out": (
        ENCODE,
        "configs/embedded",
        lambda c: c.ClearField("instance_group"),
        "finder_encode: no instances are named",
    ),
    "ragged for a native backend": (
        ENCODE,
        "configs/onnxruntime",
        lambda c: [setattr(i, "allow_ragged_batch", True) for i in c.input],
        "ragged inputs reach a native backend as one concatenated row",
    ),
    "one input that is not ragged": (
        ENCODE,
        "configs/embedded",
        lambda c: setattr(c.input[2], "allow_ragged_batch", False),
        "only input_ids, attention_mask may be ragged",
    ),
    "srv.2: rows that are not ragged": (
        ENCODE,
        "configs/embedded",
        lambda c: [setattr(i, "allow_ragged_batch", False) for i in c.input],
        "a batch ends at the first request of another length",
    ),
    "srv.2: no batching": (
        ENCODE,
        "configs/embedded",
        lambda c: c.ClearField("dynamic_batching"),
        "no dynamic_batching, so requests are never batched",
    ),
    "a delay": (
        ENCODE,
        "config",
        lambda c: setattr(c.dynamic_batching, "max_queue_delay_microseconds", 100),
        "leave max_queue_delay_microseconds at 0",
    ),
    "exp.4: a batch beyond the plan's": (
        ENCODE,
        "config",
        lambda c: setattr(c, "max_batch_size", 64),
        "finder_encode: max_batch_size 64, the plan takes 32 rows",
    ),
    "exp.4: requests beyond the batch": (
        ENCODE,
        "config",
        lambda c: setattr(c, "max_batch_size", 16),
        "requests of up to 32 rows meet a max_batch_size of 16",
    ),
    "exp.4: a profile that is not listed": (
        ENCODE,
        "config",
        lambda c: c.instance_group[0].profile.pop(),
        "profiles 0 are listed, the plan has 2, from 0",
    ),
    "exp.4: other types": (
        ENCODE,
        "config",
        lambda c: setattr(c.input[0], "data_type", pb.TYPE_INT32),
        "finder_encode: input input_ids is INT32, the plan's is INT64",
    ),
    "exp.4: other buckets": (
        TOKENIZE,
        "config",
        lambda c: setattr(c.parameters["pad_to"], "string_value", "12,40"),
        "finder_encode: finder_tokenize pads to 12,40, the plan's rows have 12, 48 tokens",
    ),
    "buckets that are none": (
        TOKENIZE,
        "config",
        lambda c: setattr(c.parameters["pad_to"], "string_value", "48,12"),
        "pad_to '48,12': ascending lengths are needed",
    ),
    "another name": (DECODE, "config", lambda c: setattr(c, "name", "decode"), "is named 'decode'"),
    "no backend": (DECODE, "config", lambda c: setattr(c, "backend", ""), "neither backend nor platform is named"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_found_and_named(case):
    model, file, change, says = FAULTS[case]
    files = edited(render_files(SPAN), f"{model}/{file}.pbtxt", change)
    faults = lint(files, "finder", default_plan(SPAN))
    assert any(says in fault for fault in faults), faults
    assert all("\n" not in fault for fault in faults) and len(faults) == len(set(faults))


def test_a_file_that_is_missing_or_malformed_is_named():
    files = render_files(SPAN)
    assert lint({k: v for k, v in files.items() if k != "finder_decode/config.pbtxt"}, "finder") == [
        "finder_decode/config.pbtxt is missing"
    ]
    (fault,) = lint(files | {"finder/config.pbtxt": 'nam: "finder"'}, "finder")
    assert fault.startswith("finder/config.pbtxt: 1:1 : ")


def test_a_repository_on_disk_is_checked_with_its_weights(tmp_path):
    folders = render(make_export(tmp_path / "export", "span"), tmp_path / "repository")
    assert [folder.name for folder in folders] == ["finder_encode", "finder_tokenize", "finder_decode", "finder"]
    assert lint_repository(tmp_path / "repository", "finder") == []
    (tmp_path / "repository" / "finder_encode" / "1" / "model.onnx").unlink()
    (tmp_path / "repository" / "finder_decode" / "1" / "task.json").unlink()
    assert [fault.rpartition("/")[2] for fault in lint_repository(tmp_path / "repository", "finder")] == [
        "model.onnx is missing",
        "task.json is missing",
    ]


def test_nothing_is_published_that_does_not_fit(tmp_path, monkeypatch):
    def wrong(*task_and_version, plan=None):
        files = render_files(*task_and_version, plan=plan)
        return edited(files, "finder_encode/config.pbtxt", lambda c: setattr(c, "max_batch_size", 99))

    export = make_export(tmp_path / "export", "span")
    add_plan(export)
    monkeypatch.setattr(repository, "render_files", wrong)
    with pytest.raises(CheckFailed, match=r"finder do not fit together: .*finder_encode: max_batch_size 99"):
        render(export, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()


def test_a_plan_and_its_facts_come_from_the_export(tmp_path):
    export = make_export(tmp_path / "export", "span")
    profiles = [{"smallest": (1, 1), "usual": (8, 48), "largest": (16, 48)}]
    add_plan(export, profiles=profiles)
    render(export, tmp_path / "repository")
    assert (tmp_path / "repository" / "finder_encode" / "1" / "model.plan").is_file()
    files = {
        path.relative_to(tmp_path / "repository").as_posix(): path.read_text()
        for path in (tmp_path / "repository").rglob("*.pbtxt")
    }
    config, tokenize = (read_config(files, f"finder_{step}", "") for step in ("encode", "tokenize"))
    assert config.max_batch_size == 16 and list(config.instance_group[0].profile) == ["0"]
    assert tokenize.parameters["pad_to"].string_value == "48"
    assert tokenize.parameters["max_rows"].string_value == "16"
    (export / "model.plan").write_bytes(b"another")
    with pytest.raises(InputError, match=r"model.plan has changed since it was made"):
        render(export, tmp_path / "repository")


def test_default_facts_render_what_is_committed():
    for task in TASKS.values():
        assert read_plan(json.loads(json.dumps(engine_facts(task))), task) == default_plan(task)


PROFILE = {"smallest": [1, 1], "usual": [8, 48], "largest": [16, 48]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"inputs": ["input_ids", "attention_mask"]}, "its inputs are attention_mask INT64, input_ids INT64; "),
        ({"inputs": dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), "FP32")}, "input_ids FP32"),
        ({"outputs": ["logits"]}, "its outputs are logits FP32; end_logits FP32, start_logits FP32 are needed"),
        ({"outputs": {"start_logits": "FP16", "end_logits": "FP16"}}, "its outputs are end_logits FP16"),
        ({"profiles": []}, "it lists no profile"),
        ({"profiles": [{"smallest": [1, 1]}]}, "its profiles are"),
        ({"profiles": [{**PROFILE, "largest": [16, 47]}]}, "its longest rows have 47 tokens, the task's have up to 48"),
        ({"profiles": [{**PROFILE, "smallest": [2, 1]}]}, "a profile begins at 2 rows of 1 tokens"),
        (
            {"profiles": [{**PROFILE, "largest": [16, n]} for n in (8, 16, 32, 48)]},
            "rows of 8, 16, 32, 48 tokens are too many buckets; 3 are allowed",
        ),
    ],
)
def test_a_plan_that_cannot_keep_the_promises_is_refused(changes, says):
    """exp.4, exp.5"""
    with pytest.raises(InputError) as caught:
        read_plan(engine_facts(SPAN, **changes), SPAN)
    assert str(caught.value).startswith("model.plan of finder: ") and says in str(caught.value)


def test_a_plan_is_chosen_by_precision_and_must_be_one_that_triton_loads():
    facts, int8 = engine_facts(SENTENCE), engine_facts(SENTENCE, file="model.int8.plan")
    usual = Plan(PLAN_MAX_BATCH, SENTENCE.buckets, 2)
    assert plan_of({}, SENTENCE) is None
    assert plan_of({"plans": {"fp16": {**facts, "module": "tensorrt_rtx"}}}, SENTENCE) is None
    both = {"plans": {"fp16": facts, "int8_qdq": int8}}
    assert plan_of(both, SENTENCE) == plan_of(both, SENTENCE, "fp32") == usual
    assert plan_of(both, SENTENCE, "int8_qdq") == dataclasses.replace(usual, file="model.int8.plan")
    assert plan_of({**both, "best": {"precision": "int8_qdq"}}, SENTENCE).file == "model.int8.plan"


def test_models_of_a_task():
    assert models_of("x") == ["x", "x_tokenize", "x_encode", "x_decode"]
