"""The playground's page in a real Chromium: type, see the answer, choose another, copy the code, read the error.

Screenshots of what was seen are left in build/screenshots.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_triton import FakeTriton, Model, labelled

from bertship.client import Client
from bertship.tasks import TASKS
from serving.playground import Playground, Served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect

SHOTS = Path(__file__).parents[1] / "build" / "screenshots"
CHROMIUM = os.environ.get("BERTSHIP_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium (Debian: install chromium)")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESK, PHONE = {"width": 1320, "height": 900}, {"width": 360, "height": 740}
ASK = {
    "sst2": {"TEXT": "a lovely film about the river"},
    "weather": {"TEXT": "It is harsh"},
    "mnli": {"TEXT": "Anna is here", "TEXT_PAIR": "it is bright"},
    "stsb": {"TEXT": "a lovely day", "TEXT_PAIR": "a bright day"},
    "squad": {
        "QUESTION": "Where did Felix go?",
        "CONTEXT": "😀👍🏽 Felix went to the castle today 👩‍👩‍👧.\nIt was lovely. Felix went to the castle today.",
    },
    "ner": {"TEXT": "😀👍🏽 It was gentle there .\nClara went to Old river . Bruno went to Old castle ."},
}
HOSTILE = (
    "</textarea><img src=x onerror=alert(1)><script>alert(2)</script>&amp; 'quote' \"two\" `ls` $(id) \\n\nJSON\n😀"
)


# what has a contrast below 4.5 to 1 (WCAG 2.2, 1.4.3)
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgb = (colour, under) => {
        canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const css = (c) => `rgb(${c.join(" ")})`;
    const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const low = [];
    for (const node of document.querySelectorAll("body *")) {
        const words = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        const box = node.getBoundingClientRect();
        if (!words || !node.offsetParent || box.width < 2 || node.closest(".unseen, noscript")) continue;
        const chain = [];
        for (let n = node; n; n = n.parentElement) chain.unshift(getComputedStyle(n).backgroundColor);
        let under = "rgb(255 255 255)";
        for (const colour of chain) under = css(rgb(colour, under));
        const [a, b] = [light(rgb(getComputedStyle(node).color, under)), light(rgb(under, under))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) low.push([node.className || node.tagName, node.textContent.slice(0, 20), ratio]);
    }
    return low;
}"""


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, request):
    """Open a playground in a window of its own; whatever its console says or it asks of other hosts fails the test."""
    contexts, complaints = [], []

    def opened(playground, task="", scheme="light", size=DESK):
        context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        # a refused request is in the console by the browser's own account, and shown on the page by ours
        page.on("console", lambda m: complaints.append(m.text) if "Failed to load resource" not in m.text else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda r: r.url.startswith(playground.url) or complaints.append(r.url))
        page.goto(f"{playground.url}/#{task}")
        return page

    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", request.node.name)
    for number, context in enumerate(contexts):
        for page in context.pages:
            page.screenshot(path=SHOTS / f"{name}{f'-{number}' if number else ''}.png", full_page=True, timeout=60_000)
        context.close()
    assert complaints == []


@pytest.fixture(scope="module")
def playground(line):
    with Playground(Served(line.server.http_url, line.repository, line.runs), port=0) as made:
        yield made.start()


@pytest.fixture(scope="module")
def client(line):
    with Client(line.server.http_url) as made:
        yield made


def ask(page, texts, parameters=None):
    """Type, send, and wait until the answer to exactly this is there."""
    for name, text in texts.items():
        if len(text) < 10_000:
            page.locator(f"textarea[name={name}]").fill(text)
        else:  # pasted, as a person would
            page.evaluate("(text) => navigator.clipboard.writeText(text)", text)
            page.locator(f"textarea[name={name}]").focus()
            page.keyboard.press("Control+a")
            page.keyboard.press("Control+v")
    if parameters is not None:
        page.locator("#parameters").evaluate("(input) => (input.closest('details').open = true)")
        page.locator("#parameters").fill(parameters)
    page.keyboard.press("Control+Enter")
    expect(page.locator("#answer:not(.stale):not(.busy)")).to_be_visible(timeout=60_000)
    expect(page.locator("#facts .windows:not(:empty), #answer.failed")).to_have_count(1)


def code_points_before(page, selector):
    """How many code points of the document stand before an element of it, the words inside it, and the text behind."""
    return page.locator(selector).first.evaluate(
        """(mark) => {
            const text = (node) => {
                if (node.nodeType === Node.TEXT_NODE) return node.textContent;
                const copy = node.cloneNode(true);
                for (const extra of copy.querySelectorAll("small")) extra.remove();
                return copy.textContent;
            };
            let before = "";
            for (let n = mark.previousSibling; n; n = n.previousSibling) before = text(n) + before;
            return [[...before].length, text(mark)];
        }"""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("task", ASK)
def test_every_task_answers(playground, open_page, client, task, scheme):
    page = open_page(playground, task, scheme)
    expect(page.locator("nav a[aria-current] b")).to_have_text(task)
    ask(page, ASK[task])
    answer = client.ask(task, **ASK[task])
    shown = page.locator("#result strong").first.inner_text()
    if "LABEL" in answer:
        assert shown == answer["LABEL"]
        bars = page.locator(".bars li")
        shares = dict(
            zip(bars.locator(".label").all_inner_texts(), bars.locator("output").all_inner_texts(), strict=True)
        )
        assert len(shares) == len(answer["PROBABILITIES"])
        assert shares[answer["LABEL"]] == f"{100 * max(answer['PROBABILITIES']):.1f}%"
        widest = max(bars.all(), key=lambda bar: bar.locator("i").bounding_box()["width"])
        assert widest.locator(".label").inner_text() == answer["LABEL"]
    elif "ANSWER" in answer:
        assert shown == answer["ANSWER"]
    elif "ENTITIES" in answer:
        assert shown == f"{len(answer['ENTITIES'])} entities"
    else:
        assert shown == f"{answer['SCORE']:.3f}"
    facts = page.locator("#facts").inner_text()
    assert re.search(r"\d ms", facts) and "version 1" in facts and re.search(r"1 window, \d+ tokens", facts)
    assert page.evaluate(CONTRAST) == []


def test_the_answer_comes_while_one_types(playground, open_page, client):
    page = open_page(playground, "sst2")
    field = page.locator("textarea")
    field.fill("")
    expect(page.locator("#result")).to_contain_text("Type something")
    for text, wanted in (("a lovely film", "positive"), ("an awful film", "negative")):
        field.fill("")
        field.press_sequentially(text)
        assert client.ask("sst2", TEXT=text)["LABEL"] == wanted
        expect(page.locator("#result strong")).to_have_text(wanted)
    page.get_by_text("Answer while I type").click()
    field.fill("a lovely film")
    expect(page.locator("#answer.stale")).to_be_visible()
    page.wait_for_timeout(600)
    expect(page.locator("#answer.stale")).to_be_visible()
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#result strong")).to_have_text("positive")


def test_the_highlight_is_the_span_in_code_points(playground, open_page, client):
    page = open_page(playground, "squad")
    ask(page, ASK["squad"])
    answer = client.ask("squad", {"top_k": 5}, **ASK["squad"])
    candidates = answer["CANDIDATES"]
    assert code_points_before(page, "mark") == [answer["START"], answer["ANSWER"]]
    assert all(candidate["start"] > 1 for candidate in candidates)  # behind characters of two UTF-16 units
    assert page.locator(".document").evaluate("(node) => node.textContent") == ASK["squad"]["CONTEXT"]
    rows = page.locator(".candidate")
    assert rows.locator(".text").all_inner_texts() == [" ".join(c["answer"].split()) for c in candidates]
    page.locator(".candidate input").first.focus()
    for candidate in candidates[1:]:
        page.keyboard.press("ArrowDown")
        assert code_points_before(page, "mark") == [candidate["start"], candidate["answer"]]
        expect(page.locator("#result strong")).to_have_text(candidate["answer"])
        expect(rows.nth(candidates.index(candidate)).locator("input")).to_be_checked()


def test_no_answer_is_said(playground, open_page, client):
    page = open_page(playground, "squad")
    ask(page, {"QUESTION": "Where did Anna go?", "CONTEXT": "It was warm."}, "null_threshold=-10000")
    expect(page.locator("#result strong")).to_have_text("No answer in the document")
    assert page.locator("mark").count() == 0


def test_entities_are_where_they_are(playground, open_page, client):
    page = open_page(playground, "ner")
    ask(page, ASK["ner"])
    entities = client.ask("ner", **ASK["ner"])["ENTITIES"]
    assert len(entities) >= 3
    for i, entity in enumerate(entities):
        assert code_points_before(page, f"mark >> nth={i}") == [entity["start"], entity["text"]]
        assert page.locator("mark small").nth(i).inner_text() == f"{entity['label']} {100 * entity['score']:.1f}%"
    label = entities[0]["label"]
    colours = {
        mark.get_attribute("data-label"): mark.evaluate("(node) => getComputedStyle(node).backgroundColor")
        for mark in page.locator("mark").all()
    }
    assert len(set(colours.values())) == len(colours) == 2
    page.locator(".kind").filter(has_text=label).click()
    assert page.locator("mark.off").count() == sum(e["label"] == label for e in entities)


def test_a_long_document_stays_usable(open_page):
    """100,000 characters: the answer is in view, alone in its pane, and the page can be typed in."""
    context = ("It was warm there 😀. " + "It was warm there. " * 99) * 42 + "Felix went to the castle today. "
    context += "It was lovely. " * 1_500
    assert len(context) > 100_000
    start = context.index("castle")

    def span(body):
        found = [
            {"answer": context[a:b], "score": 0.5, "start": a, "end": b}
            for a, b in ((start, start + 6), (0, 2), (-1, -1))
        ]
        values = {"ANSWER": "castle", "SCORE": 0.5, "START": start, "END": start + 6, "CANDIDATES": json.dumps(found)}
        return 200, [{"name": name, "shape": [1], "data": [value]} for name, value in values.items()]

    def rows(body):
        return 200, [{"name": "attention_mask", "shape": [120, 3], "data": [1, 1, 0] * 120}]

    outputs = {"ANSWER": ("BYTES", [-1]), "START": ("INT64", [-1]), "END": ("INT64", [-1])}
    models = {
        "qa": Model({"QUESTION": [-1], "CONTEXT": [-1]}, outputs, span),
        "qa_tokenize": Model({"QUESTION": [-1], "CONTEXT": [-1]}, {}, rows, platform=""),
    }
    with FakeTriton(models).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        page.get_by_text("Answer while I type").click()
        ask(page, {"QUESTION": "Where did Felix go?", "CONTEXT": context})
        assert code_points_before(page, "mark") == [start, "castle"]
        expect(page.locator("#facts")).to_contain_text("120 windows, 240 tokens")
        pane, mark = page.locator(".document").bounding_box(), page.locator("mark").bounding_box()
        assert pane["y"] < mark["y"] and mark["y"] + mark["height"] < pane["y"] + pane["height"]
        assert page.locator(".document").evaluate("(node) => node.scrollTop") > 1_000
        assert page.evaluate("scrollY") == 0
        expect(page.locator("#shortened")).to_be_visible()
        assert len(page.locator("#snippet").inner_text()) < 3_000
        page.locator("textarea[name=CONTEXT]").press("Control+End")
        page.keyboard.type("Anna left.")
        expect(page.locator(".size").last).to_have_text(f"{len(context) + 10:,} characters")


def test_a_file_becomes_the_document(playground, open_page, client, tmp_path):
    (tmp_path / "story.txt").write_text("Anna went to the market today.", encoding="utf-8")
    page = open_page(playground, "squad")
    page.locator("textarea[name=QUESTION]").fill("Where did Anna go?")
    page.locator("input[type=file]").set_input_files(tmp_path / "story.txt")
    asked = {"QUESTION": "Where did Anna go?", "CONTEXT": "Anna went to the market today."}
    expect(page.locator("#result strong")).to_have_text(client.ask("squad", **asked)["ANSWER"])
    expect(page.locator("textarea[name=CONTEXT]")).to_have_value("Anna went to the market today.")


def test_errors_are_the_servers_own(playground, open_page, line):
    page = open_page(playground, "squad")
    ask(page, ASK["squad"], "top_k=0")
    body = {
        "parameters": {"top_k": 0},
        "inputs": [{"name": n, "shape": [1], "datatype": "BYTES", "data": [t]} for n, t in ASK["squad"].items()],
    }
    said = json.loads(playground.served.infer("squad", json.dumps(body).encode()).body)["error"]
    expect(page.get_by_role("alert").locator("code")).to_have_text(said)
    expect(page.get_by_role("alert").locator("b")).to_have_text("The request was refused (400)")
    page.locator("#parameters").fill("top_k")
    expect(page.get_by_role("alert")).to_contain_text('parameter "top_k": name=value is needed')
    ask(page, {}, "top_k=2")
    expect(page.locator(".candidate")).to_have_count(2)


def test_the_reply_is_of_what_was_asked_last(playground, open_page):
    """Refused by the server: its own words; not sent, another task's, or cleared: none, and nothing to copy."""
    page = open_page(playground, "squad")
    ask(page, ASK["squad"])
    page.get_by_role("tab", name="Reply").click()
    reply, copy = page.locator("#snippet"), page.locator("#copy")
    expect(reply).to_contain_text("outputs")
    ask(page, {}, "top_k=0")
    expect(reply).to_contain_text("top_k=0")
    said = page.get_by_role("alert").locator("code").inner_text()
    assert json.loads(reply.inner_text()) == {"error": said}
    expect(copy).to_be_enabled()
    page.locator("#parameters").fill("top_k")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("alert")).to_contain_text("name=value is needed")
    expect(reply).to_have_text("No reply yet: ask something.")
    expect(copy).to_be_disabled()
    ask(page, {}, "top_k=2")
    expect(reply).to_contain_text("outputs")
    page.get_by_role("button", name="Clear").click()
    expect(reply).to_have_text("No reply yet: ask something.")
    expect(copy).to_be_disabled()
    page.get_by_role("tab", name="curl").click()
    expect(copy).to_be_enabled()


def test_the_form_has_what_the_task_takes_and_stays_in_line(playground, open_page):
    """Parameters where a task has some; the switch begins where the buttons do, at any width."""
    for task, has_some in (("sst2", False), ("squad", True), ("ner", bool(TASKS["ner"].behaviour.options))):
        page = open_page(playground, task, size={"width": 1200, "height": 900})
        expect(page.locator("h1")).to_have_text(task)
        assert page.locator("#more").is_visible() is has_some, task
        for width in (1200, 1440, 1920, 800):
            page.set_viewport_size({"width": width, "height": 900})
            left = [page.locator(part).bounding_box()["x"] for part in (".switch", "#send")]
            assert left[0] == left[1], (task, width)


@pytest.mark.parametrize("task", ["sst2", "squad", "mnli"])
def test_the_code_does_what_the_page_does(playground, open_page, task):
    """Copied as a person copies it, and run: whatever is in the text."""
    page = open_page(playground, task)
    texts = {name: f"{HOSTILE} {name}" for name in ASK[task]}
    ask(page, texts, {"squad": "top_k=2, null_threshold=1.5"}.get(task))
    page.get_by_role("tab", name="Reply").click()
    reply = json.loads(page.locator("#snippet").inner_text())
    outputs = {tensor["name"]: tensor["data"] for tensor in reply["outputs"]}
    page.get_by_role("tab", name="curl").click()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert {tensor["name"]: tensor["data"] for tensor in json.loads(done.stdout)["outputs"]} == outputs
    page.get_by_role("tab", name="Python").click()
    page.get_by_role("button", name=re.compile("Cop")).click()
    page.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('from bertship'))")
    code = page.evaluate("navigator.clipboard.readText()") + "import json; print(json.dumps(answer))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["SCORE"] == outputs["SCORE"][0]
    if "CANDIDATES" in answer:
        assert answer["CANDIDATES"] == json.loads(outputs["CANDIDATES"][0])


def test_long_texts_are_copied_whole(playground, open_page):
    page = open_page(playground, "sst2")
    text = "😀 " + "word " * 30_000  # more than one argument of a command may be long
    ask(page, {"TEXT": text})
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run(["bash"], input=command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["outputs"][0]["shape"][0] == 1 and text in command
    expect(page.locator("#facts")).to_contain_text("truncated")


def test_with_the_keyboard_alone(playground, open_page):
    page = open_page(playground, "sst2")
    expect(page.locator("#result strong")).to_be_visible()

    def focused():
        return page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()")

    page.keyboard.press("Tab")
    assert focused() == "Skip to the question"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.name") == "TEXT"
    page.keyboard.press("Control+a")
    page.keyboard.type("an awful film")
    seen = []
    while focused() != "send":
        page.keyboard.press("Tab")
        seen.append(focused())
        assert len(seen) < 6, seen
    page.keyboard.press("Enter")
    expect(page.locator("#result strong")).to_have_text("negative")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    while focused() != "tab-curl":
        page.keyboard.press("Tab")
        seen.append(focused())
        assert len(seen) < 12, seen
    page.keyboard.press("ArrowRight")
    expect(page.locator("#snippet")).to_contain_text("from bertship import Client")


def test_another_task_keeps_what_was_typed(playground, open_page):
    page = open_page(playground, "sst2")
    ask(page, {"TEXT": "an awful film"})
    page.locator("nav a[data-task=ner]").click()
    expect(page.locator("h1")).to_have_text("ner")
    expect(page.locator("#result")).to_contain_text("entit")
    page.go_back()
    expect(page.locator("textarea")).to_have_value("an awful film")
    expect(page.locator("#result strong")).to_have_text("negative")


@pytest.mark.parametrize("task", ASK)
def test_on_a_phone_nothing_is_wider_than_the_screen(playground, open_page, task):
    page = open_page(playground, task, size=PHONE)
    ask(page, ASK[task])
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, textarea, nav a, .candidate, .kind")]
            .filter((node) => node.offsetParent && !node.classList.contains("link"))
            .filter((node) => node.getBoundingClientRect().height < 28).map((node) => node.outerHTML)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_errors_can_be_read(playground, open_page, scheme):
    page = open_page(playground, "squad", scheme)
    ask(page, ASK["squad"], "nonsense=1")
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.evaluate(CONTRAST) == []


def test_the_theme_can_be_chosen_and_stays(playground, open_page):
    page = open_page(playground, "sst2", scheme="light")

    def background():
        return page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    auto = background()
    button = page.locator("#theme")
    button.click()
    assert background() == auto and button.inner_text() == "Theme: light"
    button.click()
    assert background() != auto and button.inner_text() == "Theme: dark"
    page.reload()
    expect(button).to_have_text("Theme: dark")
    assert background() != auto


def test_hostile_texts_and_labels_stay_text(open_page):
    """In a model's name, labels, entities and errors as in the text itself."""
    spans = [{"label": HOSTILE, "text": "x", "start": 0, "end": 3, "score": 0.5}]

    def entities(body):
        return 200, [{"name": "ENTITIES", "datatype": "BYTES", "shape": [1], "data": [json.dumps(spans)]}]

    def error(body):
        return 400, {"error": HOSTILE}

    models = {
        "a<img src=x onerror=alert(3)>": labelled([HOSTILE, "other"], lambda text: 0),
        "b": Model({"TEXT": [-1]}, {"ENTITIES": ("BYTES", [-1])}, entities),
        "c": Model({"TEXT": [-1]}, {"SCORE": ("FP32", [-1])}, error),
    }
    with FakeTriton(models).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        field = page.locator("textarea")
        expect(page.locator("h1")).to_have_text("a<img src=x onerror=alert(3)>")
        field.fill(HOSTILE)
        expect(page.locator("#result strong")).to_have_text(HOSTILE)
        for task, place in (("b", "mark small"), ("c", "[role=alert] code")):
            page.locator(f"nav a[data-task={task}]").click()
            expect(page.locator("h1")).to_have_text(task)
            field.fill(HOSTILE)
            expect(page.locator(place)).to_contain_text(HOSTILE)
        expect(page.locator("main img, main script, nav img")).to_have_count(0)
        expect(page.locator("textarea")).to_have_count(1)


def test_label_names_are_learnt_from_answers(open_page):
    """A server tells the name of the best label alone; without its repository the page learns them one by one."""
    mood = labelled(["bad", "good", "so-so"], lambda text: {"good": 1, "poor": 0}.get(text, 2))
    with FakeTriton({"mood": mood}).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        labels = page.locator(".bars .label")
        expect(labels).to_have_text(["label 1", "label 2", "so-so"])
        page.locator("textarea").fill("good")
        expect(labels).to_have_text(["label 1", "good", "so-so"])
        page.locator("textarea").fill("poor")
        expect(labels).to_have_text(["bad", "good", "so-so"])


def test_a_version_that_is_deployed_meanwhile(open_page):
    """The page notices by its answer, forgets the old labels, and asks the new version."""
    with FakeTriton({"mood": labelled(["bad", "good"], lambda text: 1)}).run() as fake:
        fake.models["mood"].pinned = 1
        with Playground(Served(fake.url), port=0) as made:
            page = open_page(made.start())
            expect(page.locator("#facts .version")).to_have_text("version 1")
            fake.models["mood"] = labelled(["sad", "so-so", "glad"], lambda text: 2)
            fake.models["mood"].pinned = 2
            page.locator("textarea").fill("anything")
            expect(page.locator("#facts .version")).to_have_text("version 2")
            expect(page.locator(".bars .label")).to_have_text(["label 1", "label 2", "glad"])


def test_many_labels_choices_and_unknown_tensors(open_page):
    def choice(body):
        assert body["inputs"][1]["shape"] == [1, 3]
        return 200, [
            {"name": "CHOICE", "datatype": "INT64", "shape": [1], "data": [2]},
            {"name": "SCORE", "datatype": "FP32", "shape": [1], "data": [0.7]},
            {"name": "PROBABILITIES", "datatype": "FP32", "shape": [1, 3], "data": [0.1, 0.2, 0.7]},
        ]

    def vector(body):
        return 200, [{"name": "VECTOR", "datatype": "FP32", "shape": [1, 3], "data": [0.5, 1, 2]}]

    outputs = {"CHOICE": ("INT64", [-1]), "SCORE": ("FP32", [-1]), "PROBABILITIES": ("FP32", [-1, -1])}
    models = {
        "many": labelled([f"label {i}" for i in range(40)], lambda text: 30),
        "swag": Model({"TEXT": [-1], "CHOICES": [-1, -1]}, outputs, choice),
        "vector": Model({"TEXT": [-1]}, {"VECTOR": ("FP32", [-1, 3])}, vector),
    }
    with FakeTriton(models).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start(), "many")
        expect(page.locator("#result strong")).to_have_text("label 30")
        expect(page.locator(".bars:visible li")).to_have_count(8)
        page.get_by_text("32 more").click()
        expect(page.locator(".bars:visible li")).to_have_count(40)
        page.locator("nav a[data-task=swag]").click()
        page.locator("textarea[name=CHOICES]").fill("one\ntwo\nthree")
        expect(page.locator("#result strong")).to_have_text("three")
        expect(page.locator(".bars .label")).to_have_text(["one", "two", "three"])
        page.locator("nav a[data-task=vector]").click()
        expect(page.locator(".tensors td")).to_have_text("[0.5,1,2]")


def test_a_late_answer_does_not_overtake(open_page):
    released = threading.Event()

    def choose(text):
        if text == "slow":
            released.wait(20)
        return int(text == "slow")

    mood = {"mood": labelled(["fast", "slow"], choose)}
    with FakeTriton(mood).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        expect(page.locator("#result strong")).to_have_text("fast")
        page.locator("textarea").fill("slow")
        expect(page.locator("#answer.busy")).to_be_visible()
        expect(page.locator("#answer")).to_have_attribute("aria-busy", "true")
        page.locator("textarea").fill("quick")
        expect(page.locator("#answer:not(.stale)")).to_be_visible()
        released.set()
        page.wait_for_timeout(300)
        expect(page.locator("#result strong")).to_have_text("fast")


def test_a_server_that_is_gone_and_comes_back(open_page):
    mood = {"mood": labelled(["bad", "good"], lambda text: 1)}
    with FakeTriton(mood).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        expect(page.locator("#server.good")).to_be_visible()
        port, made.served._port = made.served._port, 1
        page.locator("textarea").fill("anybody there?")
        expect(page.get_by_role("alert")).to_contain_text("The server failed (502)")
        expect(page.get_by_role("alert")).to_contain_text("start one with `make serve`")
        expect(page.locator("#server.good")).to_have_count(0)
        page.reload()
        expect(page.locator("#problem")).to_contain_text("no server at")
        made.served._port = port
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#result strong")).to_have_text("good")


def test_nothing_is_served(open_page):
    with FakeTriton({}).run() as fake, Playground(Served(fake.url), port=0) as made:
        page = open_page(made.start())
        expect(page.locator("#problem")).to_contain_text(f"{fake.url} serves no task")
