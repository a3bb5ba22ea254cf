// The page: picks a task, asks it, shows the answer and how to ask it in code.

import { firstOf, viewOf } from "./answers.js";
import { curl, parseParameters, pythonCode, requestBody, shorten } from "./request.js";
import { Points, count, el, milliseconds } from "./text.js";

const LIVE_LENGTH = 2000; // UTF-16 units up to which an answer comes while one types
const LONG_PASTE = 10_000; // UTF-16 units
const PAUSE_MS = 220;
const WORDS = {
  TEXT: "Text",
  TEXT_PAIR: "Second text",
  QUESTION: "Question",
  CONTEXT: "Document",
  CHOICES: "Choices, one a line",
};
const KINDS = {
  label: "label",
  pair: "label of a pair",
  score: "number",
  answers: "question and answer",
  entities: "entities",
  choice: "choice",
  tensors: "tensors",
};

const $ = (id) => document.getElementById(id);
const page = { server: "", tasks: [], task: null, language: "curl", sequence: 0, drafts: new Map() };
let pause = 0;
let asking = null;

// ---- tasks

async function load() {
  let reply;
  try {
    const response = await fetch("api/tasks");
    reply = await response.json();
    if (!response.ok) throw new Error(reply.error);
    if (!reply.tasks.length) throw new Error(`${reply.server} serves no task; export one and start the server again`);
  } catch (error) {
    status(false, "not connected");
    problem("There is nothing to ask", reply ? error.message : "The playground itself has ended. Start it again with `make playground`.");
    return;
  }
  page.server = reply.server;
  // labels that a server has told by answering stay known
  const before = new Map(page.tasks.map((task) => [task.name, task]));
  page.tasks = reply.tasks.map((task) => {
    const old = before.get(task.name);
    return old && old.version === task.version && !task.labels.length ? { ...task, labels: old.labels } : task;
  });
  status(true, page.server.replace("http://", ""));
  $("problem").hidden = true;
  $("tasks").replaceChildren(
    ...page.tasks.map((task) => {
      const link = el("a", { href: `#${encodeURIComponent(task.name)}` }, el("b", {}, task.name));
      link.append(el("span", {}, KINDS[viewOf(task).kind]));
      link.dataset.task = task.name;
      return link;
    }),
  );
  choose();
}

function status(good, text) {
  $("server").classList.toggle("good", good);
  $("server").lastElementChild.textContent = text;
}

function problem(what, why) {
  const [title, text] = $("problem").children;
  title.textContent = what;
  text.textContent = why;
  $("problem").hidden = false;
  $("columns").hidden = $("code").hidden = true;
}

function choose() {
  let wanted = "";
  try {
    wanted = decodeURIComponent(location.hash.slice(1));
  } catch {
    // a broken address names no task
  }
  const named = (name) => page.tasks.find((task) => task.name === name);
  const task = named(wanted) ?? named(page.task?.name) ?? page.tasks[0];
  const changed = page.task?.name !== task.name;
  page.task = task;
  for (const link of $("tasks").children) {
    if (link.dataset.task === task.name) {
      link.setAttribute("aria-current", "page");
      $("tasks").scrollLeft = link.offsetLeft - 16;
    } else link.removeAttribute("aria-current");
  }
  document.title = `${task.name} · bertship playground`;
  $("name").textContent = task.name;
  $("description").textContent = task.description;
  $("columns").hidden = $("code").hidden = false;
  if (!changed) return;
  asking?.abort();
  page.raw = ""; // another task's
  const draft = page.drafts.get(task.name) ?? { values: {}, parameters: firstParameters(task), example: 0 };
  page.drafts.set(task.name, draft);
  $("fields").replaceChildren(...task.inputs.map((tensor, i) => field(tensor, i)));
  $("parameters").value = draft.parameters;
  // null where the server alone does not tell which there are
  $("more").hidden = task.options !== null && !Object.keys(task.options).length;
  $("example").hidden = !task.examples.length;
  const blank = task.inputs.every(({ name }) => !draft.values[name]);
  if (!blank) ask();
  else if (task.examples.length) fillExample();
  else rest();
}

/** A few more answers than the server gives by itself, so that there is something to choose from. */
function firstParameters(task) {
  return viewOf(task).kind === "answers" ? "top_k=5" : "";
}

// ---- fields

function field({ name, shape }, index) {
  const draft = page.drafts.get(page.task.name);
  const pair = page.task.inputs.some((tensor) => tensor.name === "TEXT_PAIR");
  const title = name === "TEXT" && pair ? "First text" : (WORDS[name] ?? name);
  const many = shape.length > 1;
  const long = name === "CONTEXT" || many || page.task.inputs.length === 1;
  const area = el("textarea", { id: `field-${index}`, name, rows: long ? 5 : 2, value: draft.values[name] ?? "", spellcheck: false });
  area.className = long ? "long" : "";
  const size = el("span", { className: "size" });
  const measure = () => {
    area.classList.toggle("huge", area.value.length > LONG_PASTE);
    size.textContent = area.value ? count(new Points(area.value).length, "character") : "";
  };
  area.addEventListener("input", () => {
    draft.values[name] = area.value;
    measure();
    changed();
  });
  area.addEventListener("paste", (event) => {
    const text = event.clipboardData.getData("text/plain");
    if (text.length < LONG_PASTE) return;
    // Chromium's own way takes seconds a key from then on where the text has characters of several fonts
    event.preventDefault();
    area.setRangeText(text.replace(/\r\n?/g, "\n"), area.selectionStart, area.selectionEnd, "end");
    area.dispatchEvent(new Event("input"));
  });
  if (!long) {
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        ask();
      }
    });
  }
  const row = el("div", { className: "above" }, el("label", { htmlFor: area.id }, title), el("code", {}, name), size);
  if (name === "CONTEXT" || page.task.inputs.length === 1) row.append(opener(area));
  measure();
  return el("div", { className: "field" }, row, area);
}

/** A text file into a field, by a button or by dropping it there. */
function opener(area) {
  const input = el("input", { type: "file", accept: "text/*,.txt,.md,.csv,.json", hidden: true });
  const take = async (file) => {
    if (!file) return;
    area.value = await file.text();
    area.dispatchEvent(new Event("input"));
    ask();
  };
  input.addEventListener("change", () => take(input.files[0]));
  area.addEventListener("dragover", (event) => event.preventDefault());
  area.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  const button = el("button", { type: "button", className: "link" }, "Open a file");
  button.addEventListener("click", () => input.click());
  return el("span", {}, button, input);
}

function set(values) {
  const draft = page.drafts.get(page.task.name);
  for (const area of $("fields").querySelectorAll("textarea")) {
    const value = values[area.name] ?? "";
    area.value = draft.values[area.name] = Array.isArray(value) ? value.join("\n") : value;
    area.scrollTop = 0;
    // for the count of its characters; the question itself is asked once, by the caller
    area.dispatchEvent(new Event("input"));
  }
}

function fillExample() {
  const draft = page.drafts.get(page.task.name);
  set(page.task.examples[draft.example++ % page.task.examples.length]);
  ask();
}

/** The values as they are sent: a text a tensor, a list for one that takes several. */
function values() {
  const given = {};
  for (const { name, shape } of page.task.inputs) {
    const text = page.drafts.get(page.task.name).values[name] ?? "";
    given[name] = shape.length > 1 ? text.split("\n").filter((line) => line.trim()) : text;
  }
  return given;
}

// ---- asking

function changed() {
  $("answer").classList.add("stale");
  code();
  clearTimeout(pause);
  const size = Object.values(values()).flat().reduce((total, text) => total + text.length, 0);
  if (!size) rest();
  else if ($("live").checked && size <= LIVE_LENGTH) pause = setTimeout(ask, PAUSE_MS);
}

/** Nothing to answer yet. */
function rest() {
  asking?.abort();
  page.sequence++;
  page.raw = "";
  $("result").replaceChildren(el("p", { className: "rest" }, "Type something, or take an example."));
  $("facts").replaceChildren();
  $("answer").classList.remove("stale", "failed", "busy");
  code();
}

async function ask() {
  clearTimeout(pause);
  asking?.abort();
  asking = new AbortController();
  const mine = ++page.sequence;
  const { task } = page;
  const given = values();
  code();
  let parameters;
  try {
    parameters = parseParameters($("parameters").value);
  } catch (error) {
    refused("", error.message);
    return;
  }
  const body = JSON.stringify(requestBody(task, given, parameters));
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body, signal: asking.signal };
  let text = "";
  const slow = setTimeout(() => waiting(task, options, mine), 300);
  try {
    const response = await fetch(`api/infer/${encodeURIComponent(task.name)}`, options);
    text = await response.text();
    if (mine !== page.sequence) return;
    if (!response.ok) {
      refused(response.status, messageOf(text), text);
      status(response.status < 500 || response.status === 500, page.server.replace("http://", ""));
      return;
    }
    status(true, page.server.replace("http://", ""));
    page.raw = text;
    answered(task, JSON.parse(text), given, response);
    details(task, options, mine, JSON.parse(text).model_version);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (mine === page.sequence) refused("", error instanceof TypeError ? "The playground itself has ended. Start it again with `make playground`." : error.message, text);
  } finally {
    clearTimeout(slow);
    if (mine === page.sequence) {
      $("answer").classList.remove("busy");
      $("answer").removeAttribute("aria-busy");
    }
  }
}

function messageOf(text) {
  try {
    return JSON.parse(text).error ?? text;
  } catch {
    return text;
  }
}

function answered(task, reply, given, response) {
  const answer = firstOf(reply);
  const { node, said, shown } = viewOf(task).show(answer, given, task);
  $("result").replaceChildren(node);
  shown?.();
  $("said").textContent = said;
  $("answer").classList.remove("stale", "failed");
  const spent = /dur=([\d.]+)/.exec(response.headers.get("Server-Timing") ?? "");
  const fact = (name, value, hint) => el("span", { title: hint, className: name }, value);
  $("facts").replaceChildren(
    ...(spent ? [fact("latency", milliseconds(Number(spent[1])), "From the request to Triton's last byte, over HTTP on this machine")] : []),
    fact("windows", "", "Rows of the encoder that the request made, and tokens in them"),
    fact("version", "", "The model's version on the server"),
    ...(answer.TRUNCATED ? [fact("truncated", "truncated", "The text was longer than the model takes: its end was not read")] : []),
  );
  code();
}

/** An answer that takes its time: say that it comes, and from how much. */
async function waiting(task, options, mine) {
  $("answer").classList.add("busy", "stale");
  $("answer").setAttribute("aria-busy", "true");
  const told = await rows(task, options);
  if (mine === page.sequence && $("answer").classList.contains("busy") && told.rows) {
    $("facts").replaceChildren(el("span", { className: "latency" }, `reading ${sizeOf(told)} …`));
  }
}

/** What the answer came from: asked apart, so that it does not keep the answer waiting. */
async function details(task, options, mine, ensemble) {
  const told = await rows(task, options);
  if (mine !== page.sequence) return;
  if (told.rows) $("facts").querySelector(".windows").textContent = sizeOf(told);
  $("facts").querySelector(".version").textContent = `version ${told.version || ensemble}`;
  if (told.version && told.version !== task.version) {
    // another version serves now, perhaps with other labels: learn them, and ask it
    await load();
    if (mine === page.sequence && page.task.version === told.version) ask();
  }
}

const sizeOf = (told) => `${count(told.rows, "window")}, ${count(told.tokens, "token")}`;

/** Rows, tokens and version; empty where the server does not tell: the answer stands without them. */
async function rows(task, options) {
  try {
    const response = await fetch(`api/rows/${encodeURIComponent(task.name)}`, options);
    return response.ok ? await response.json() : {};
  } catch {
    return {};
  }
}

/** Why there is no answer; `raw` is the server's reply, empty where it gave none. */
function refused(number, message, raw = "") {
  const title = number ? `The request was refused (${number})` : "The request was not sent";
  const node = el("div", { className: "refused", role: "alert" }, el("b", {}, number >= 500 ? `The server failed (${number})` : title), el("code", {}, message));
  $("result").replaceChildren(node);
  $("facts").replaceChildren();
  $("answer").classList.remove("stale", "busy");
  $("answer").classList.add("failed");
  page.raw = raw;
  code();
}

// ---- the same in code

const LANGUAGES = { curl: "curl", python: "Python", reply: "Reply" };

/** The chosen language's text for given texts. */
function snippet(given) {
  let parameters = {};
  try {
    parameters = parseParameters($("parameters").value);
  } catch {
    // said where the question is asked
  }
  if (page.language === "python") return pythonCode(page.server, page.task, given, parameters);
  if (page.language === "curl") return curl(page.server, page.task, requestBody(page.task, given, parameters));
  return indented(page.raw);
}

/** JSON on lines of its own; what is none, as it came. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}

function code() {
  if (!page.task) return;
  const [short, cut] = shorten(values());
  const text = snippet(short);
  $("snippet").textContent = text || "No reply yet: ask something.";
  $("snippet").classList.toggle("none", !text);
  $("copy").disabled = !text;
  $("shortened").hidden = !cut || page.language === "reply";
}

function languages() {
  const tabs = Object.entries(LANGUAGES).map(([name, title]) => {
    const tab = el("button", { type: "button", role: "tab", id: `tab-${name}` }, title);
    tab.addEventListener("click", () => select(name));
    return tab;
  });
  const select = (name) => {
    page.language = name;
    for (const tab of tabs) {
      const chosen = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", chosen);
      tab.tabIndex = chosen ? 0 : -1;
    }
    $("snippet").setAttribute("aria-labelledby", `tab-${name}`);
    code();
  };
  $("languages").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.findIndex((tab) => tab.tabIndex === 0) + step + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });
  $("languages").replaceChildren(...tabs);
  select("curl");
}

async function copy() {
  const text = snippet(values());
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // no clipboard outside a secure context: the old way
    const area = el("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => ($("copy").textContent = "Copy"), 1500);
}

// ---- light and dark

const THEMES = { auto: "auto", light: "light", dark: "dark" };

function theme(name) {
  const chosen = name in THEMES ? name : "auto";
  document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Theme: ${THEMES[chosen]}`;
  try {
    localStorage.setItem("theme", chosen);
  } catch {
    // kept for this page alone
  }
}

function storedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    ask();
  }
});
$("parameters").addEventListener("input", () => {
  page.drafts.get(page.task.name).parameters = $("parameters").value;
  changed();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the task
  $("fields").querySelector("textarea")?.focus();
});
$("example").addEventListener("click", fillExample);
$("clear").addEventListener("click", () => {
  set({});
  $("fields").querySelector("textarea").focus();
});
$("copy").addEventListener("click", copy);
$("problem").lastElementChild.addEventListener("click", load);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
});
window.addEventListener("hashchange", () => page.tasks.length && choose());
theme(storedTheme());
languages();
load();
