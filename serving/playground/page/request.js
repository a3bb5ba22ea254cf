// One question as the server takes it, and as curl and Python say it.

const SHORT = 400; // UTF-16 units of a text that are shown

/** "top_k=5, null_threshold=none" as an object; throws an Error that says what is wrong. */
export function parseParameters(line) {
  const parameters = {};
  for (const part of line.split(",").filter((piece) => piece.trim())) {
    const [, name, value] = /^\s*([^=\s]+)\s*=\s*(.*?)\s*$/s.exec(part) ?? [];
    if (!name || !value) throw new Error(`parameter "${part.trim()}": name=value is needed, such as top_k=5`);
    if (/^(true|false)$/.test(value)) parameters[name] = value === "true";
    // the protocol has whole numbers and no fractions: those travel as strings
    else parameters[name] = /^-?\d{1,15}$/.test(value) ? Number(value) : value;
  }
  return parameters;
}

/** The body of Triton's infer request for one element of each input. */
export function requestBody(task, values, parameters) {
  const body = Object.keys(parameters).length ? { parameters } : {};
  body.inputs = task.inputs.map(({ name, datatype, shape }) => {
    const data = [values[name]].flat();
    return { name, shape: shape.length > 1 ? [1, data.length] : [1], datatype, data };
  });
  return body;
}

/** A quoted here-document: nothing in a text means anything to the shell, and its length has no limit. */
export function curl(server, task, body) {
  const lines = [
    ...(body.parameters ? [` "parameters": ${JSON.stringify(body.parameters)},`] : []),
    ` "inputs": [`,
    body.inputs.map((tensor) => `  ${JSON.stringify(tensor)}`).join(",\n"),
  ];
  lines[0] = `{${lines[0].slice(1)}`;
  const url = `${server}/v2/models/${encodeURIComponent(task.name)}/infer`;
  return `curl -s ${url} --data-binary @- <<'JSON'\n${lines.join("\n")}]}\nJSON\n`;
}

const python = (value) =>
  typeof value === "boolean"
    ? value ? "True" : "False"
    : Array.isArray(value)
      ? `[${value.map(python).join(", ")}]`
      : JSON.stringify(value); // a JSON string is a Python string too

/** The same with the client; `bertship.Client` takes one text a name. */
export function pythonCode(server, task, values, parameters) {
  const named = task.inputs.map(({ name, shape }) => [name, shape.length > 1 ? [values[name]] : values[name]]);
  const plain = named.every(([name]) => /^[A-Za-z_]\w*$/.test(name));
  const given = plain
    ? named.map(([name, value]) => `        ${name}=${python(value)},\n`).join("")
    : `        **{${named.map(([name, value]) => `${JSON.stringify(name)}: ${python(value)}`).join(", ")}},\n`;
  const set = Object.entries(parameters).map(([name, value]) => `${JSON.stringify(name)}: ${python(value)}`);
  return (
    `from bertship import Client\n\nwith Client(${JSON.stringify(server)}) as client:\n    answer = client.ask(\n` +
    `        ${JSON.stringify(task.name)},\n${set.length ? `        {${set.join(", ")}},\n` : ""}${given}    )\n` +
    `print(answer)\n`
  );
}

/** Values whose texts are short enough to be shown, and whether any was cut. */
export function shorten(values) {
  let cut = false;
  const short = (text) => {
    if (text.length <= SHORT) return text;
    cut = true;
    const end = text.codePointAt(SHORT - 1) > 0xffff ? SHORT - 1 : SHORT; // no half of a character
    return `${text.slice(0, end)}…`;
  };
  const entries = Object.entries(values).map(([name, value]) => [
    name,
    Array.isArray(value) ? value.map(short) : short(value),
  ]);
  return [Object.fromEntries(entries), cut];
}
