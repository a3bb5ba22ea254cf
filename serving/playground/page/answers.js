// What an answer looks like, by the tensors that a task gives: a task that we have never seen has its view too.

import { Points, count, el, percent } from "./text.js";

const SHOWN_LABELS = 8;
const HUES = [255, 145, 25, 320, 85, 195, 290, 55];

/** The view of a task: what it is called in the list, and `show(reply, values, task)` to a node and a sentence. */
export function viewOf(task) {
  const has = (...names) => names.every((name) => task.outputs.some((tensor) => tensor.name === name));
  if (has("ENTITIES")) return { kind: "entities", show: entities };
  if (has("ANSWER", "START", "END")) return { kind: "answers", show: span };
  if (has("CHOICE", "PROBABILITIES")) return { kind: "choice", show: choice };
  if (has("LABEL", "PROBABILITIES")) return { kind: task.inputs.length > 1 ? "pair" : "label", show: label };
  if (has("SCORE")) return { kind: "score", show: score };
  return { kind: "tensors", show: tensors };
}

/** The tensors of a reply for its first element: numbers, strings, or lists of them. */
export function firstOf(reply) {
  return Object.fromEntries(
    reply.outputs.map(({ name, shape, data }) => {
      const size = shape.slice(1).reduce((product, n) => product * n, 1);
      return [name, shape.length > 1 ? data.slice(0, size) : data[0]];
    }),
  );
}

function headline(text, aside, muted = false) {
  return el("div", { className: `headline${muted ? " muted" : ""}` }, el("strong", {}, text), el("span", {}, aside));
}

function bars(rows) {
  const line = ({ name, share, best }) => {
    const fill = el("i");
    fill.style.setProperty("--share", share);
    return el(
      "li",
      { className: best ? "best" : "" },
      el("span", { className: "label", title: name }, name),
      el("span", { className: "bar", "aria-hidden": "true" }, fill),
      el("output", {}, percent(share)),
    );
  };
  if (rows.length <= SHOWN_LABELS) return el("ol", { className: "bars" }, ...rows.map(line));
  const sorted = [...rows].sort((a, b) => b.share - a.share);
  return el(
    "div",
    {},
    el("ol", { className: "bars" }, ...sorted.slice(0, SHOWN_LABELS).map(line)),
    el(
      "details",
      {},
      el("summary", {}, `${rows.length - SHOWN_LABELS} more`),
      el("ol", { className: "bars" }, ...sorted.slice(SHOWN_LABELS).map(line)),
    ),
  );
}

function label(answer, _values, task) {
  const shares = answer.PROBABILITIES;
  const best = shares.indexOf(Math.max(...shares));
  task.labels[best] = answer.LABEL; // a server tells no other names than those that it answers
  const rows = shares.map((share, i) => ({ name: task.labels[i] ?? `label ${i + 1}`, share, best: i === best }));
  return {
    node: el("div", {}, headline(answer.LABEL, percent(answer.SCORE)), bars(rows)),
    said: `${answer.LABEL}, ${percent(answer.SCORE)}`,
  };
}

function choice(answer, values) {
  const [name] = Object.keys(values).filter((key) => Array.isArray(values[key]));
  const choices = values[name];
  const rows = choices.map((text, i) => ({ name: text, share: answer.PROBABILITIES[i], best: i === answer.CHOICE }));
  return {
    node: el("div", {}, headline(choices[answer.CHOICE], percent(answer.SCORE)), bars(rows)),
    said: `${choices[answer.CHOICE]}, ${percent(answer.SCORE)}`,
  };
}

function score(answer, _values, task) {
  const value = answer.SCORE;
  const node = el("div", {}, el("div", { className: "value" }, el("strong", {}, value.toFixed(3))));
  if (task.scale.length) {
    const [low, high] = task.scale;
    const dot = el("i");
    dot.style.setProperty("--share", Math.min(1, Math.max(0, (value - low) / (high - low || 1))));
    node.append(
      el("div", { className: "scale", "aria-hidden": "true" }, dot),
      el("div", { className: "ends" }, el("span", {}, low.toFixed(2)), el("span", {}, high.toFixed(2))),
      el("p", { className: "note" }, "From the lowest to the highest value on the texts that the export was checked with."),
    );
  }
  return { node, said: value.toFixed(3) };
}

/** The document with one span marked, and the answers to choose from. */
function span(answer, values, task) {
  const input = task.inputs[task.inputs.length - 1].name;
  const text = new Points(values[input]);
  const own = { answer: answer.ANSWER, score: answer.SCORE, start: answer.START, end: answer.END };
  const candidates = answer.CANDIDATES ? JSON.parse(answer.CANDIDATES) : [own];
  const page = el("div", { className: "document", tabIndex: 0, role: "region", "aria-label": "Document" });
  const head = el("div");
  const choose = (candidate) => {
    const none = candidate.start < 0;
    head.replaceChildren(headline(none ? "No answer in the document" : candidate.answer, percent(candidate.score), none));
    if (none) {
      page.replaceChildren(text.text);
      page.scrollTop = 0;
      return;
    }
    const mark = el("mark", { className: "answer" }, text.slice(candidate.start, candidate.end));
    page.replaceChildren(text.slice(0, candidate.start), mark, text.slice(candidate.end));
    // in the pane alone: the page itself stays where it is
    page.scrollTop += mark.getBoundingClientRect().top - page.getBoundingClientRect().top - page.clientHeight / 2.5;
  };
  const place = (start) => (start < 0 || !text.length ? "" : `at ${Math.round((100 * start) / text.length)}%`);
  const rows = candidates.map((candidate, i) => {
    const radio = el("input", { type: "radio", name: "candidate", checked: i === 0 });
    radio.addEventListener("change", () => choose(candidate));
    return el(
      "label",
      { className: "candidate" },
      radio,
      el("span", { className: "text" }, candidate.start < 0 ? "no answer" : candidate.answer),
      el("span", { className: "place" }, place(candidate.start)),
      el("output", {}, percent(candidate.score)),
    );
  });
  const list = el("fieldset", { className: "candidates" }, el("legend", {}, "Answers, the best first"), ...rows);
  const node = el("div", {}, head, candidates.length > 1 ? list : null, page);
  return {
    node,
    said: own.start < 0 ? "no answer in the document" : `${own.answer}, ${percent(own.score)}`,
    shown: () => choose(candidates[0]), // once it has a height to scroll in
  };
}

/** The text with its entities coloured, and what kinds there are. */
function entities(answer, values, task) {
  const text = new Points(values[task.inputs[0].name]);
  const found = JSON.parse(answer.ENTITIES);
  const kinds = [...new Set(found.map((entity) => entity.label))].sort();
  // a colour stays with its kind from one text to the next
  const known = [...new Set(task.labels.map((name) => name.replace(/^[BI]-/, "")))].filter((name) => name !== "O").sort();
  for (const kind of kinds) if (!known.includes(kind)) known.push(kind);
  const hue = (kind) => HUES[known.indexOf(kind) % HUES.length];
  const tinted = (node, kind) => {
    node.style.setProperty("--hue", hue(kind));
    return node;
  };
  const page = el("div", { className: "document", tabIndex: 0, role: "region", "aria-label": "Text with its entities" });
  let end = 0;
  for (const entity of [...found].sort((a, b) => a.start - b.start)) {
    if (entity.start < end) continue;
    page.append(text.slice(end, entity.start));
    const mark = el(
      "mark",
      { className: "entity", title: `${entity.label} ${percent(entity.score)}` },
      text.slice(entity.start, entity.end),
      el("small", {}, entity.label, " ", el("b", {}, percent(entity.score))),
    );
    mark.dataset.label = entity.label;
    page.append(tinted(mark, entity.label));
    end = entity.end;
  }
  page.append(text.slice(end));
  const filters = kinds.map((kind) => {
    const box = el("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      for (const mark of page.querySelectorAll("mark")) {
        if (mark.dataset.label === kind) mark.classList.toggle("off", !box.checked);
      }
    });
    const number = found.filter((entity) => entity.label === kind).length;
    return tinted(el("label", { className: "kind" }, box, el("span", {}, kind), el("b", {}, String(number))), kind);
  });
  const said = found.length ? count(found.length, "entity", "entities") : "no entities";
  return {
    node: el(
      "div",
      {},
      headline(said[0].toUpperCase() + said.slice(1), "", !found.length),
      filters.length ? el("div", { className: "kinds" }, ...filters) : null,
      page,
    ),
    said,
  };
}

/** Whatever a task gives that has no view of its own. */
function tensors(answer) {
  const rows = Object.entries(answer).map(([name, value]) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, typeof value === "string" ? value : JSON.stringify(value))),
  );
  return { node: el("table", { className: "tensors" }, ...rows), said: "answered" };
}
