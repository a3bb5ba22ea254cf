"""The embedded server's steps, in the real Triton: turns, batches of mixed lengths, parameters, metrics."""

import json
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from small_bert import CONFIG, LETTERS, make_examples
from small_repository import SENTENCE, SPAN, TOKEN, ask_at_once, columns_of, make_export, serving

from bertship.client import Client
from bertship.errors import InvalidRequest
from bertship.pipeline import from_export
from bertship.tokenization import Row
from bertship.triton_limits import FLUSH_S
from bertship.triton_turns import Work
from serving import environment
from serving.bench import bench
from serving.bench import counted as counters_in
from serving.control import HEADER, read_key
from serving.repository import VERSION, ready_models, render
from serving.server import TritonServer

TASKS = {"sentence": SENTENCE, "span": SPAN, "token": TOKEN}
# heavy enough that the encoder is what clients wait for: MiniLM's size, and a smaller one
MINILM = CONFIG.model_copy(
    update={"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
)
WIDER = CONFIG.model_copy(
    update={"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
)
MIXED = [" ".join(LETTERS[(i * n) % 26] for n in range(1 + (11 * i) % 120)) for i in range(96)]
LONG = {"QUESTION": ["a b"], "CONTEXT": ["c d e f " * 1300]}  # some 150 windows


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exports")
    made = {task.name: make_export(folder / task.name, head) for head, task in TASKS.items()}
    made["slow"] = make_export(folder / "slow", "sentence", MINILM, name="slow", max_tokens=128)
    made["reader"] = make_export(folder / "reader", "span", WIDER, name="reader")
    return made


@pytest.fixture(scope="module")
def served(exports, tmp_path_factory):
    repository = tmp_path_factory.mktemp("embedded") / "repository"
    for export in exports.values():
        render(export, repository)
    with serving(environment.prepare(), repository) as server:
        yield server


@pytest.fixture(scope="module")
def urls(served):
    return (served.http_url, f"grpc://{served.grpc_url}")


def metrics(served):
    time.sleep(4 * FLUSH_S)  # until the steps have told what they counted
    text = urllib.request.urlopen(served.metrics_url).read().decode()
    return {(name, task): value for task, counters in counters_in(text).items() for name, value in counters.items()}


def counted(served, task, before):
    return {name: value - before[name, of] for (name, of), value in metrics(served).items() if of == task}


# ------------------------------------------------------------------------------------------------------------- turns


def rows_of(*lengths):
    return [Row(np.arange(length, dtype=np.int64), np.zeros(length, np.int64)) for length in lengths]


def test_a_turn_is_as_many_rows_as_fit_and_never_none():
    work = Work(rows_of(5, 5, 5, 20, 20, 1), 20)
    assert [len(row) for row in work.turn(16, 1)] == [5, 5, 5]
    assert [len(row) for row in work.turn(1, 1)] == [5]
    assert [len(row) for row in work.turn(1, 2)] == [5, 5]
    assert len(work.turn(1000, 1)) == 6
    work.add({"logits": [np.zeros(5)] * 3})
    assert [len(row) for row in work.turn(16, 1)] == [20] and work.left == 3
    work.add({"logits": [np.zeros(20), np.zeros(20), np.zeros(1)]})
    assert work.left == 0 and work.turn(16, 1) == [] and len(work.done["logits"]) == 6


def test_a_carried_request_keeps_its_own_copy():
    ids = np.ones((2, 3), np.int64)
    work = Work([Row(row, row) for row in ids], 3)
    work.keep()
    ids[:] = 7
    assert [row.ids.tolist() for row in work.rows] == [[1, 1, 1]] * 2


# ------------------------------------------------------------------------------------------------------ fair batches


def test_a_long_document_delays_others_by_a_turn_not_by_its_length(served, urls, exports):
    """Short requests that come while it runs are answered before it, many of them."""
    expected = from_export(exports["reader"])(LONG)
    short = {name: values[:1] for name, values in columns_of(SPAN).items()}
    for url in urls:
        answered, reply = [], {}

        def ask_long(url=url, reply=reply):
            with Client(url, timeout_s=120) as client:
                reply.update(client.infer("reader", LONG))

        thread = threading.Thread(target=ask_long)
        thread.start()
        with Client(url, timeout_s=120) as client:
            alone = client.infer("reader", short)
            while thread.is_alive():
                answered.append(client.infer("reader", short))
        thread.join()
        assert len(answered) > 5
        for answer in answered:
            assert answer["CANDIDATES"].tolist() == alone["CANDIDATES"].tolist()
        for name, values in expected.items():
            np.testing.assert_array_equal(reply[name], values, err_msg=name)


def test_long_documents_take_turns_and_keep_their_own_rows(urls, exports):
    """Twelve at once, of unlike lengths, and short ones among them: each gets the bits that it gets alone."""
    contexts = ["".join(LETTERS[(i + n) % 26] + " " for n in range(300 * (1 + i % 4))) for i in range(12)] + [
        "x y"
    ] * 12
    requests = [{"QUESTION": ["a b"], "CONTEXT": [context]} for context in contexts]
    expected = from_export(exports["finder"])
    for url in urls:
        for request, reply in zip(requests, ask_at_once(url, "finder", requests, 24), strict=True):
            for name, values in expected(request).items():
                np.testing.assert_array_equal(reply[name], values, err_msg=name)


def test_a_long_document_is_answered_while_its_model_is_unloaded(exports, tmp_path):
    """What is carried over asks for its turns like any request, and a model that is going refuses requests."""
    repository = tmp_path / "repository"
    render(exports["reader"], repository)
    expected = from_export(exports["reader"])(LONG)
    server = TritonServer(environment.prepare())
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    with (
        server.start(repository, models=ready_models(repository), log_path=tmp_path / "log", **ports),
        tritonclient.http.InferenceServerClient(server.http_url.removeprefix("http://")) as control,
        Client(server.http_url, timeout_s=120) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        reply = pool.submit(client.infer, "reader", LONG)
        executions = 0
        while executions < 5:  # it is being carried over
            (stats,) = control.get_inference_statistics("reader_encode")["model_stats"]
            executions = stats["execution_count"]
            time.sleep(0.01)
        control.unload_model("reader_encode", headers={HEADER: read_key(server.key_path)})
        for name, values in expected.items():
            np.testing.assert_array_equal(reply.result()[name], values, err_msg=name)
        assert executions < 50


def test_nobody_else_can_ask_for_a_turn(served, urls):
    tensors = []
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        tensors.append(tritonclient.http.InferInput(name, [1, 1], "INT64"))
        tensors[-1].set_data_from_numpy(np.ones((1, 1), np.int64))
    address = served.http_url.removeprefix("http://")
    with tritonclient.http.InferenceServerClient(address) as client:
        with pytest.raises(tritonclient.utils.InferenceServerException, match="no request is carried over as 'x'"):
            client.infer("finder_encode", tensors, parameters={"bertship_continue": "x"})
        assert client.infer("finder_encode", tensors).as_numpy("start_logits").shape == (1, 1)
    with Client(urls[0]) as client, pytest.raises(InvalidRequest, match="unknown parameter 'bertship_continue'"):
        client.ask("finder", {"bertship_continue": "x"}, QUESTION="a", CONTEXT="b")


def test_at_32_clients_more_than_6_requests_reach_the_encoder_at_once(served, exports, tmp_path):
    """srv.2: of mixed lengths."""
    (row,) = bench(
        "slow",
        [{"columns": {"TEXT": text}} for text in MIXED],
        http_url=served.http_url,
        grpc_url=served.grpc_url,
        metrics_url=served.metrics_url,
        triton=environment.prepare(),
        out=tmp_path,
        concurrencies=(32,),
        protocols=("http",),
        seconds=4,
    )["rows"]
    assert row["requests_a_batch"] > 6 and row["padding_share"] == 0, row


def test_answers_under_load_are_those_that_texts_have_alone(urls, exports):
    """Bit by bit, whoever the neighbours in the batch are."""
    expected = from_export(exports["slow"])({"TEXT": MIXED})
    for url in urls:
        replies = ask_at_once(url, "slow", [{"TEXT": [text]} for text in MIXED], 32)
        for i, reply in enumerate(replies):
            for name, values in expected.items():
                np.testing.assert_array_equal(reply[name][0], values[i], err_msg=f"{name} {i}")


def test_sixty_five_texts_and_a_thousand_windows_pass(urls, exports):
    """And 4,096 rows; one more is refused with the limit."""
    texts = {"TEXT": ["a b c"] * 65}
    windows = {"QUESTION": ["a"], "CONTEXT": ["b " * 36_100]}
    with Client(urls[1], timeout_s=120) as client:
        assert len(client.infer("moods", texts)["LABEL"]) == 65
        expected = from_export(exports["finder"])(windows)
        for name, values in client.infer("finder", windows).items():
            np.testing.assert_array_equal(values, expected[name])
        assert len(client.infer("moods", {"TEXT": ["a"] * 4096})["LABEL"]) == 4096
        with pytest.raises(InvalidRequest, match=r"makes 4,097 rows .* at most 4,096 are allowed"):
            client.infer("moods", {"TEXT": ["a"] * 4097})


RECORD = """
import json, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.outputs = [(o["name"], o["dims"]) for o in json.loads(args["model_config"])["output"]]
        self.file = open({record!r}, "a")

    def execute(self, requests):
        start = time.monotonic()
        time.sleep(0.02)
        replies = []
        for request in requests:
            shape = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().shape
            dims = [[shape[0], *(shape[1] if d == -1 else d for d in dims)] for _, dims in self.outputs]
            made = [pb_utils.Tensor(n, np.zeros(d, np.float32)) for (n, _), d in zip(self.outputs, dims)]
            replies.append(pb_utils.InferenceResponse(made))
        self.file.write(json.dumps([start, time.monotonic()]) + "\\n")
        self.file.flush()
        return replies
"""


@pytest.mark.parametrize("limited", [True, False])
def test_encoders_of_several_tasks_take_turns_at_the_cores(exports, tmp_path, limited):
    """srv.7: no two run at once; without the rate limiter they would, so the test can fail."""
    repository, record = tmp_path / "repository", tmp_path / "record"
    for name in ("moods", "finder", "marks"):
        render(exports[name], repository)
        (repository / f"{name}_encode" / VERSION / "model.py").write_text(RECORD.format(record=str(record)))
    flags = () if limited else ("--rate-limit=off",)
    with serving(environment.prepare(), repository, extra_flags=flags) as server:
        record.write_text("")
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(ask_at_once, server.http_url, task.name, [columns_of(task, 1)] * 16, 4)
                for task in TASKS.values()
            ]
            assert all(len(replies.result()) == 16 for replies in asked)
    spans = sorted(json.loads(line) for line in record.read_text().splitlines())
    overlaps = sum(after[0] < before[1] for before, after in pairwise(spans))
    assert len(spans) >= 12
    assert overlaps == 0 if limited else overlaps > 0


# -------------------------------------------------------------------------------------------------------- parameters


def ask_raw(served, protocol, task, columns, parameters):
    """With plain tritonclient."""
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    address = served.http_url.removeprefix("http://") if protocol == "http" else served.grpc_url
    tensors = []
    for name, texts in columns.items():
        tensors.append(module.InferInput(name, [len(texts)], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([text.encode() for text in texts], object))
    with module.InferenceServerClient(address) as client:
        return client.infer(task, tensors, parameters=parameters)


PARAMETERS = [
    ("finder", {"top_k": 7}),
    ("finder", {"max_answer_tokens": 1}),
    ("finder", {"null_threshold": "-1.5"}),
    ("finder", {"top_k": "4", "null_threshold": "none", "max_answer_tokens": 3}),
    ("marks", {"aggregation": "average"}),
    ("marks", {"aggregation": "max"}),
    ("marks", {"aggregation": "first"}),
]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(("name", "parameters"), PARAMETERS)
def test_a_request_sets_its_parameters(served, urls, exports, protocol, name, parameters):
    task = next(task for task in TASKS.values() if task.name == name)
    columns, pipeline = columns_of(task), from_export(exports[name])
    expected = pipeline(columns, parameters)
    reply = ask_raw(served, protocol, name, columns, parameters)
    with Client(urls[0]) as client:
        by_client = client.infer(name, columns, parameters)
    for tensor, values in expected.items():
        got = reply.as_numpy(tensor).tolist()
        assert [v.decode() if isinstance(v, bytes) else v for v in got] == values.tolist()
        np.testing.assert_array_equal(by_client[tensor], values)
    standing = {**task.options, **({"aggregation": "first"} if name == "marks" else {})}
    changed = any(standing.get(key) != value for key, value in parameters.items())
    default = pipeline(columns)
    same = all(default[tensor].tolist() == expected[tensor].tolist() for tensor in expected)
    assert same != changed


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("finder", {"top_k": 0}, "parameter top_k=0: a whole number from 1 to 100 is needed"),
        ("finder", {"top_k": "many"}, "parameter top_k='many': a whole number"),
        ("finder", {"max_answer_tokens": 513}, "parameter max_answer_tokens=513"),
        ("finder", {"null_threshold": "nan"}, "parameter null_threshold='nan': a number"),
        ("finder", {"topk": 1}, "unknown parameter 'topk' for finder; known: top_k, max_answer_tokens, null_threshold"),
        ("marks", {"aggregation": "sum"}, "parameter aggregation='sum': one of first, average, max is needed"),
        ("marks", {"aggregation": 1}, "parameter aggregation=1: one of first"),
        ("moods", {"top_k": 1}, "unknown parameter 'top_k' for moods; known: none"),
    ],
)
def test_a_bad_parameter_is_invalid_in_one_line(served, protocol, name, parameters, says):
    task = next(task for task in TASKS.values() if task.name == name)
    before = metrics(served)
    with pytest.raises(tritonclient.utils.InferenceServerException) as caught:
        ask_raw(served, protocol, name, columns_of(task, 1), parameters)
    assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert says in caught.value.message() and "\n" not in caught.value.message().strip()
    assert counted(served, name, before)["refused_requests"] == 1


# ----------------------------------------------------------------------------------------------------------- metrics


def test_what_the_steps_count_is_in_tritons_metrics(served, urls):
    before = metrics(served)
    with Client(urls[0]) as client:
        client.infer("moods", {"TEXT": ["a", "a b", "a " * 100]})
        client.infer("moods", {"TEXT": [""]})
        with pytest.raises(InvalidRequest):
            client.infer("moods", {"TEXT": []})
    assert counted(served, "moods", before) == {
        "texts": 4,
        "rows": 4,
        "tokens": 3 + 4 + 32 + 2,
        "padding_tokens": 0,  # rows run unpadded
        "truncated_texts": 1,
        "refused_requests": 1,
        "executions": 2,
        "execution_requests": 2,
        "execution_rows": 4,
    }
    before = metrics(served)
    with Client(urls[1]) as client:
        client.infer("finder", {"QUESTION": ["a"], "CONTEXT": ["b " * 100]})
    did = counted(served, "finder", before)
    # windows of 44 context tokens that share 8: 0-44, 36-80, 72-100
    assert (did["texts"], did["rows"], did["tokens"]) == (1, 3, 48 + 48 + 32)
    assert did["execution_rows"] == 3


def test_padding_for_native_backends_is_counted(exports, tmp_path):
    """The share of padding: the tokenizing step of the other worlds, before the embedded encoder."""
    repository = tmp_path / "repository"
    render(exports["moods"], repository)
    shutil.copy2(
        repository / "moods_tokenize" / "config.pbtxt", repository / "moods_tokenize" / "configs" / "embedded.pbtxt"
    )
    with serving(environment.prepare(), repository) as server:
        before = metrics(server)
        with Client(server.http_url) as client:
            client.infer("moods", {"TEXT": ["a", "a b c d e f g h"]})
        did = counted(server, "moods", before)
    assert (did["tokens"], did["padding_tokens"]) == (3 + 10, 2 * 32 - 13)


def test_examples_are_long_enough_to_prove_windows():
    assert max(len(e.columns["CONTEXT"].split()) for e in make_examples("span", 20)) > 20
